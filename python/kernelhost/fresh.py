"""Makes a forked process what a newly started interpreter would be, before any code of its own runs.

Owns: everything of the template that a life must not inherit. Must not know: frames, cells, how the fork was asked for.
"""

import _signal
import os
import sys

_STANDARD = range(1, 7)
_FIRST_FREE = 7
# `SeedSequence()` draws 128 bits; a seed that somebody chose is smaller.
_DRAWN = 1 << 64
_MARKER = "KERNELHOST_LIFE"
_LOCALE_VARIABLES = ("LC_ALL", "LC_CTYPE", "LANG")


def lead_session():
    os.setsid()


def reserve_standard_numbers():
    """In the template, before anything is loaded: what libraries open gets none of the numbers of a life's wires."""
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    while null < _FIRST_FREE:
        null = os.dup(null)
    os.close(null)


def descriptors_of_libraries():
    """The descriptors of shared objects that are mapped: libffi keeps one of itself, to map its trampolines from.

    Without it the first new ctypes callback of a fork would fail, or map whatever file has got the number since.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if int(name) >= _FIRST_FREE and ".so" in target:
            found.append((int(name), target))
    if not found:
        return []
    with open("/proc/self/maps") as maps:
        mapped = maps.read()
    return sorted(fd for fd, target in found if target in mapped)


def place_descriptors(descriptors, kept):
    """Moves the six wires to the numbers they have in a spawned life, and closes all others but the `kept` ones."""
    import fcntl

    # Out of the way first: the numbers that they came with may be the numbers that others have to get.
    try:
        parked = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 32) for fd in descriptors]
    except OSError as error:
        raise OSError(
            error.errno, "no room for the descriptors of a life: the limit of open files (RLIMIT_NOFILE)"
        ) from None
    for fd, number in zip(parked, _STANDARD, strict=True):
        os.dup2(fd, number, inheritable=number < 3)
    first = _FIRST_FREE
    for fd in kept:
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, max(os.sysconf("SC_OPEN_MAX"), 1 << 16))


def arm_lifeline(fd):
    """The end of this pipe kills our process group, whatever the interpreter is doing. Exits if it has ended before."""
    import fcntl
    import select

    fcntl.fcntl(fd, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(fd, 10, _signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(fd, 0)
    if any(event & select.POLLHUP for _, event in poll.poll(0)):
        os._exit(1)


def reset_signals():
    """As the interpreter finds them: SIGPIPE and SIGXFSZ ignored, all others at their default.

    SIGINT keeps the template's handler, which does nothing, until the life has its own.
    """
    _signal.set_wakeup_fd(-1)
    ignored = {_signal.SIGPIPE, _signal.SIGXFSZ}
    for number in _signal.valid_signals():
        handler = _signal.getsignal(number)
        if number == _signal.SIGINT:
            continue
        if handler is not None and (handler == _signal.SIG_IGN) != (number in ignored):
            _signal.signal(number, _signal.SIG_IGN if number in ignored else _signal.SIG_DFL)
        elif callable(handler):
            _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def take_environment(wanted):
    """Exactly these variables, in `os.environ` and in the C library."""
    environ = os.environ
    locale_before = [environ.get(name) for name in _LOCALE_VARIABLES]
    for name in [name for name in environ if name not in wanted]:
        del environ[name]
    for name, value in wanted.items():
        if environ.get(name) != value:
            environ[name] = value
    import time

    time.tzset()
    if locale_before != [environ.get(name) for name in _LOCALE_VARIABLES]:
        _take_locale()


def shown_environment():
    """In the template: the environment that others see in procfs, as (address, name, value) of each variable."""
    try:
        with open("/proc/self/environ", "rb") as file:
            variables = file.read().split(b"\0")
        with open("/proc/self/stat", "rb") as file:
            address = int(file.read().rpartition(b")")[2].split()[47])  # env_start
    except OSError:
        return []
    found = []
    for variable in variables:
        name, is_one, value = variable.partition(b"=")
        if is_one:
            found.append((address, name, value))
        address += len(variable) + 1
    return found


def show_environment(variables):
    """Others are to see this life's own marker, also in what it merely forks, and nothing that only its template has.

    What procfs shows is the memory in which the environment came. The C library still points there for each variable
    that is the same in this life; the others have copies elsewhere, so that what they were can be written over.
    """
    environment = os.environb
    changed = [(at, name, value) for at, name, value in variables if environment.get(name) != value]
    try:
        memory = os.open("/proc/self/mem", os.O_WRONLY | os.O_CLOEXEC)
        try:
            for address, name, value in changed:
                new = environment.get(name, b"")
                if name == _MARKER.encode() and len(new) == len(value):
                    os.pwrite(memory, new, address + len(name) + 1)
                else:
                    os.pwrite(memory, bytes(len(name) + 1 + len(value)), address)
        finally:
            os.close(memory)
    except OSError:
        # Where procfs is locked down the group, the session and the parents still tell.
        pass


def _take_locale():
    import _locale

    try:
        found = _locale.setlocale(_locale.LC_CTYPE, "")
        if found in ("C", "POSIX") and not os.environ.get("LC_ALL"):
            # What the interpreter does at its start (PEP 538).
            _locale.setlocale(_locale.LC_CTYPE, "C.UTF-8")
    except _locale.Error:
        pass


def generators():
    """In the template, before its objects are frozen: the numpy generators whose seed was drawn and not chosen."""
    if "numpy.random" not in sys.modules:
        return []
    import gc

    found = []
    for thing in gc.get_objects():
        bits = getattr(thing, "bit_generator", None) if type(thing).__name__ == "Generator" else None
        entropy = getattr(getattr(bits, "seed_seq", None), "entropy", None)
        if isinstance(entropy, int) and entropy >= _DRAWN:
            found.append(bits)
    return found


def forget_randomness(generators):
    """Random numbers and names that are drawn from here on are this life's own. `random` has reseeded itself."""
    modules = sys.modules
    numpy_random = modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    for bits in generators:
        bits.state = type(bits)().state
    tempfile = modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None
        tempfile._name_sequence = None
    uuid = modules.get("uuid")
    if uuid is not None:
        uuid._last_timestamp = None
        _take_clock_sequence(uuid)


def _take_clock_sequence(uuid):
    """The C library keeps one for all forks of a process: two that ask in the same microsecond would get the same."""
    original = getattr(uuid, "_generate_time_safe", None)
    if original is None:
        return
    original = getattr(original, "original", original)
    high, low = os.urandom(2)
    sequence = bytes((0x80 | high & 0x3F, low))

    def generate_time_safe():
        made, is_safe = original()
        return made[:8] + sequence + made[10:], is_safe

    generate_time_safe.original = original
    uuid._generate_time_safe = generate_time_safe


def forget_processes():
    """What multiprocessing remembers of the process it was imported in."""
    process = sys.modules.get("multiprocessing.process")
    if process is None:
        return
    process._children.clear()
    process._current_process._config["authkey"] = process.AuthenticationString(os.urandom(32))
    forget_folder()


def forget_folder():
    """To be called again when the working directory has been changed."""
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        try:
            process.ORIGINAL_DIR = os.getcwd()
        except OSError:
            process.ORIGINAL_DIR = None


def rename_main_thread():
    """Before 3.13 the main thread keeps the number it had in the template."""
    threading = sys.modules.get("threading")
    rename = getattr(getattr(threading, "_main_thread", None), "_set_native_id", None)
    if rename is not None:
        rename()


class Inheritance:
    """What of a template its forks must treat with care: found once, when everything is loaded."""

    __slots__ = ("descriptors", "environment", "generators")

    def __init__(self):
        self.descriptors = descriptors_of_libraries()
        self.generators = generators()
        self.environment = shown_environment()


def become(descriptors, environment, inheritance):
    """All of it, in the order in which the parts need each other."""
    lead_session()
    place_descriptors(descriptors, inheritance.descriptors)
    arm_lifeline(6)
    reset_signals()
    take_environment(environment)
    show_environment(inheritance.environment)
    forget_randomness(inheritance.generators)
    forget_processes()
    rename_main_thread()
