"""A backend of matplotlib for the shell that has no IPython: figures are shown to the host as PNG.

As Jupyter's: `plt.show()` shows and closes what is open, and so does the end of a cell, unless `plt.ioff()` was called.
Only matplotlib imports this, when the first figure is made.

Owns: when a figure is shown. Must not know: how it becomes a PNG (bundles), frames, cells.
"""

import matplotlib
from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

NAME = "module://kernelhost.figures"


def publish(figure):
    """Replaced by the shell that takes them."""


class FigureManager(FigureManagerBase):
    """`figure.show()` shows this one and leaves it open."""

    def show(self):
        publish(self.canvas.figure)


class FigureCanvas(FigureCanvasAgg):
    """A name and a class that matplotlib asks a backend for."""

    manager_class = FigureManager


def show(*_, **__):
    managers = Gcf.get_all_fig_managers()
    try:
        for manager in managers:
            publish(manager.canvas.figure)
    finally:
        if managers:
            Gcf.destroy_all()


def show_what_is_left():
    if matplotlib.is_interactive() and matplotlib.get_backend().lower() == NAME:
        show()
