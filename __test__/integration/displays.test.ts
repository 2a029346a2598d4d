/** What real libraries show in cells, in both shells. */

import assert from 'node:assert/strict';
import { test } from 'node:test';
import { crc32, inflateSync } from 'node:zlib';
import type { CellResult, Display, Kernel, KernelHostOptions, MimeBundle, Output } from 'kernelhost';
import { json, ok, writeModules } from '../fixtures/forkserver-look.ts';
import {
  hasModule,
  lacksLibraries,
  librariesPythonForTests,
  startHost,
  type TestContext,
  temporaryFolder,
} from '../helpers/index.ts';

const shells = ['ipython', 'plain'] as const;
type ShellName = (typeof shells)[number];

const skip = lacksLibraries;

function kernelOf(t: TestContext, shell: ShellName, options: KernelHostOptions = {}): Kernel {
  const python = librariesPythonForTests() ?? 'none';
  // What the developer's own session says is none of the kernel's.
  const defaults = {
    env: { MPLBACKEND: undefined, COLUMNS: undefined, FORCE_COLOR: undefined },
    inheritEnv: 'all',
  } as const;
  return startHost(t, { python, shell, defaults, ...options }).kernel();
}

const dataOf = ({ displays }: CellResult): MimeBundle[] => displays.map(({ data }) => data);

/** One word per output: its text, or the media types of what is shown. */
function words(outputs: readonly Output[]): string[] {
  return outputs.map((output) => {
    if (output.kind === 'text') return `${output.stream} ${output.text.trim()}`;
    const data = output.kind === 'display' ? output.display.data : output.kind === 'value' ? output.data : {};
    return [output.kind, ...Object.keys(data).sort()].join(' ');
  });
}

const figure = 'display image/png text/plain';

/** Takes a PNG apart by the book: signature, checksums, and as much picture as its header says. Throws where it is none. */
function decodePng(base64: unknown): { width: number; height: number } {
  assert.ok(typeof base64 === 'string');
  const bytes = Buffer.from(base64, 'base64');
  assert.equal(bytes.subarray(0, 8).toString('latin1'), '\x89PNG\r\n\x1a\n');
  const chunks: [string, Buffer][] = [];
  for (let at = 8; at < bytes.length; ) {
    const end = at + 8 + bytes.readUInt32BE(at);
    assert.equal(crc32(bytes.subarray(at + 4, end)), bytes.readUInt32BE(end));
    chunks.push([bytes.toString('latin1', at + 4, at + 8), bytes.subarray(at + 8, end)]);
    at = end + 4;
  }
  assert.equal(chunks.at(-1)?.[0], 'IEND');
  const [name, header] = chunks[0] ?? [];
  assert.ok(name === 'IHDR' && header !== undefined);
  const [width, height, depth, color] = [header.readUInt32BE(0), header.readUInt32BE(4), header[8], header[9]];
  assert.deepEqual([depth, color], [8, 6], 'eight bits for each of red, green, blue and alpha');
  const data = Buffer.concat(chunks.filter(([each]) => each === 'IDAT').map(([, piece]) => piece));
  assert.equal(inflateSync(data).length, height * (1 + 4 * width));
  return { width, height };
}

/** Whether the picture has pixels of the colour in which matplotlib draws a first line. */
async function showsALine(kernel: Kernel, base64: unknown): Promise<boolean> {
  const code = [
    'import base64, io, json; from PIL import Image',
    `picture = Image.open(io.BytesIO(base64.b64decode("${base64}"))).convert("RGB")`,
    'print(json.dumps((31, 119, 180) in {color for _, color in picture.getcolors(1 << 24)}))',
  ].join('\n');
  return json<boolean>(kernel, code);
}

for (const shell of shells) {
  test(`a figure is shown by plt.show(), without a magic (${shell})`, { skip }, async (t) => {
    const kernel = kernelOf(t, shell);
    const code =
      'import matplotlib.pyplot as plt\nprint("before")\nplt.plot([1, 3, 2])\nplt.show()\nprint("after")\nlen(plt.get_fignums())';
    const { outputs, displays, text } = await ok(kernel, code);
    assert.deepEqual(words(outputs), ['stdout before', figure, 'stdout after', 'value text/plain']);
    assert.equal(text, '0', 'what was shown is closed');
    const png = displays[0]?.data['image/png'];
    const { width, height } = decodePng(png);
    assert.ok(width > 300 && height > 200, `${width}×${height}`);
    assert.ok(await showsALine(kernel, png));
    assert.equal(displays[0]?.data['text/plain'], '<Figure size 640x480 with 1 Axes>');
  });

  test(`figures that are open when their cell ends are shown then, and closed (${shell})`, { skip }, async (t) => {
    const kernel = kernelOf(t, shell);
    const two = await ok(
      kernel,
      'import matplotlib.pyplot as plt\nplt.plot([1])\nplt.figure(); plt.plot([2]); print("x")',
    );
    assert.deepEqual(words(two.outputs), ['stdout x', figure, figure]);
    for (const { data } of two.displays) decodePng(data['image/png']);
    assert.equal((await ok(kernel, 'len(plt.get_fignums())')).text, '0');
    assert.deepEqual((await ok(kernel, '1')).displays, []);

    const value = await ok(kernel, 'figure, axes = plt.subplots(); plt.close(figure); figure');
    assert.deepEqual(words(value.outputs), ['value image/png text/plain']);
    decodePng(value.data?.['image/png']);

    const failed = await kernel.execute('plt.plot([1])\n1/0');
    assert.deepEqual(words(failed.outputs), [figure, 'error'], 'also those of a cell that fails');
    assert.equal(failed.error?.name, 'ZeroDivisionError');

    assert.deepEqual((await ok(kernel, 'plt.ioff(); plt.plot([1]); None')).outputs, [], 'unless plt.ioff() was called');
    assert.deepEqual(words((await ok(kernel, 'plt.show()')).outputs), [figure]);
  });

  test(`MPLBACKEND and matplotlib.use() decide where they are used (${shell})`, { skip }, async (t) => {
    const kernel = kernelOf(t, shell, { defaults: { env: { MPLBACKEND: 'agg' }, inheritEnv: 'all' } });
    const code = 'import matplotlib.pyplot as plt\nplt.plot([1]); print(plt.get_backend())';
    assert.deepEqual(words((await ok(kernel, code)).outputs), ['stdout agg']);
    const own = kernelOf(t, shell);
    const used = await ok(own, `import matplotlib\nmatplotlib.use("agg")\n${code}`);
    assert.deepEqual(words(used.outputs), ['stdout agg']);
  });

  test(`a program that a cell starts inherits nothing of how figures are shown (${shell})`, { skip }, async (t) => {
    const kernel = kernelOf(t, shell);
    const code = [
      'import matplotlib.pyplot as plt, os, subprocess, sys',
      'plt.plot([1]); plt.show(); print("MPLBACKEND" in os.environ)',
      'program = "import matplotlib.pyplot as plt; plt.plot([1]); print(plt.get_backend())"',
      '_ = subprocess.run([sys.executable, "-c", program], check=True)',
    ].join('\n');
    const { stdout, displays } = await ok(kernel, code);
    assert.deepEqual(stdout.split('\n'), ['False', 'agg', '']);
    assert.equal(displays.length, 1);
  });

  test(`figures are shown by lives whose template has imported matplotlib (${shell})`, { skip }, async (t) => {
    const kernel = kernelOf(t, shell, { launch: 'fork', preload: ['matplotlib.pyplot'] });
    for (let round = 0; round < 2; round++) {
      const { displays, life } = await ok(kernel, 'import matplotlib.pyplot as plt\nplt.plot([1, 2]); None');
      assert.equal(life.launch, 'fork');
      assert.equal(displays.length, 1);
      assert.ok(await showsALine(kernel, displays[0]?.data['image/png']));
      await kernel.restart();
    }
  });

  test(`pandas: a frame is HTML and text, as a value and as a display (${shell})`, { skip }, async (t) => {
    const kernel = kernelOf(t, shell);
    const frame = 'import pandas as pd\nframe = pd.DataFrame({"größe": [1, 2]})';
    const result = await ok(kernel, `${frame}\ndisplay(frame)\nframe`);
    assert.deepEqual(words(result.outputs), ['display text/html text/plain', 'value text/html text/plain']);
    for (const data of [result.data, result.displays[0]?.data]) {
      assert.match(String(data?.['text/html']), /<table[^>]*class="dataframe">.*<th>größe<\/th>/s);
      assert.equal(data?.['text/plain'], '   größe\n0      1\n1      2');
    }
    assert.equal((await ok(kernel, 'frame["größe"]')).data?.['text/html'], undefined, 'a series is text');
  });

  test(`displays have ids, and a handle updates its own (${shell})`, { skip }, async (t) => {
    const kernel = kernelOf(t, shell);
    const code =
      'handle = display("one", display_id=True)\nother = display("two", display_id="mine")\nhandle.update("three")\ndisplay("four", display_id="mine", update=True)\nother.display("five")';
    const { displays } = await ok(kernel, code);
    const id = displays[0]?.displayId ?? '';
    assert.match(id, /^\w{16,}$/);
    const told = ({ data, displayId, update }: Display) => [data['text/plain'], displayId, update];
    assert.deepEqual(displays.map(told), [
      ["'one'", id, false],
      ["'two'", 'mine', false],
      ["'three'", id, true],
      ["'four'", 'mine', true],
      ["'five'", 'mine', false],
    ]);
    const later = await ok(kernel, 'handle.update("six")');
    assert.deepEqual(later.displays.map(told), [["'six'", id, true]], 'also from another cell');
  });

  test(`tqdm draws its bar as text, on one line (${shell})`, { skip }, async (t) => {
    const kernel = kernelOf(t, shell);
    for (const module of ['tqdm', 'tqdm.auto']) {
      const { stderr, outputs } = await ok(
        kernel,
        `from ${module} import tqdm\nfor _ in tqdm(range(3), mininterval=0): pass`,
      );
      const states = stderr.split('\r');
      assert.equal(states[0], '');
      assert.match(states[1] ?? '', /^ {2}0%\|/);
      assert.match(states.at(-1) ?? '', /^100%\|█+\| 3\/3 .*\n$/);
      assert.ok(outputs.every(({ kind }) => kind === 'text'));
    }
  });

  test(`rich prints text without colours, and its renderables are shown as HTML and text (${shell})`, {
    skip,
  }, async (t) => {
    const kernel = kernelOf(t, shell);
    const printed = await ok(kernel, 'from rich import print as say\nsay("[bold red]hi[/]", {"a": 1})');
    assert.deepEqual(words(printed.outputs), ["stdout hi\n{'a': 1}"]);
    const table = 'from rich.table import Table\ntable = Table(title="T"); table.add_column("a"); table.add_row("1")';
    const shown = await ok(kernel, `${table}\ndisplay(table)\ntable`);
    assert.deepEqual(words(shown.outputs), ['display text/html text/plain', 'value text/html text/plain']);
    assert.match(String(shown.data?.['text/plain']), /┏━+┓\n┃ a ┃/);
    const bar = await ok(kernel, 'from rich.progress import track\nfor _ in track(range(3)): pass');
    assert.match(bar.stdout, /100%/);
  });

  test(`rich's tracebacks leave the error what it is (${shell})`, { skip }, async (t) => {
    const kernel = kernelOf(t, shell);
    await ok(kernel, 'import rich.traceback, rich.pretty\n_ = rich.traceback.install()\nrich.pretty.install()');
    for (const [code, name] of [
      ['1/0', 'ZeroDivisionError'],
      ['1 +', 'SyntaxError'],
    ] as const) {
      const failed = await kernel.execute(code);
      assert.equal(failed.status, 'error');
      assert.match(failed.error?.name ?? '', new RegExp(name));
      assert.ok((failed.error?.traceback.length ?? 0) > 0);
    }
    assert.equal((await ok(kernel, '6 * 7')).text?.trim(), '42');
  });
}

for (const shell of hasModule('IPython') ? shells : (['plain'] as const)) {
  test(`whatever goes by the name of matplotlib can be looked for and imported (${shell})`, async (t) => {
    const folder = temporaryFolder(t);
    writeModules(folder, { matplotlib: 'mine = True' });
    const kernel = startHost(t, { shell }).kernel({ cwd: folder });
    const looked = 'import importlib.util\nimportlib.util.find_spec("matplotlib").loader.get_source("matplotlib")';
    assert.equal((await ok(kernel, looked)).text, "'mine = True'");
    assert.equal((await ok(kernel, 'import matplotlib\nmatplotlib.mine')).text, 'True');
  });
}

test('the inline backend of IPython can be asked for, and configured', { skip }, async (t) => {
  const kernel = kernelOf(t, 'ipython');
  const plot = 'import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.show()';
  const inline = await ok(kernel, `%matplotlib inline\n${plot}`);
  assert.deepEqual(words(inline.outputs), [figure]);
  assert.ok(await showsALine(kernel, inline.displays[0]?.data['image/png']));
  const svg = await ok(kernel, `%config InlineBackend.figure_formats = ["svg"]\n${plot}`);
  assert.deepEqual(words(svg.outputs), ['display image/svg+xml text/plain']);
  assert.match(String(svg.displays[0]?.data['image/svg+xml']), /<svg .*<\/svg>/s);
  const auto = kernelOf(t, 'ipython');
  assert.deepEqual(words((await ok(auto, `%matplotlib\n${plot}`)).outputs).slice(1), [figure], 'also by its bare name');
});

test('what IPython.display offers arrives under its media type', { skip }, async (t) => {
  const kernel = kernelOf(t, 'ipython');
  const code = [
    'import base64',
    'from IPython.display import HTML, JSON, SVG, GeoJSON, Image, Javascript, Latex, Markdown, Math, display',
    `png = base64.b64decode("${ONE_PIXEL}")`,
    `display(HTML("<b>ü</b>"), Markdown("# t"), Latex("$x$"), Math("x^2"), JSON({"a": [1, None]}), SVG('<svg xmlns="http://www.w3.org/2000/svg"/>'))`,
    'display(Image(png), Image(png, width=10), Javascript("1"), GeoJSON({"type": "Point", "coordinates": [0, 0]}))',
  ].join('\n');
  const { displays } = await ok(kernel, code);
  const expected: [string, unknown][] = [
    ['text/html', '<b>ü</b>'],
    ['text/markdown', '# t'],
    ['text/latex', '$x$'],
    ['text/latex', '$\\displaystyle x^2$'],
    ['application/json', { a: [1, null] }],
    ['image/svg+xml', '<svg xmlns="http://www.w3.org/2000/svg"/>'],
    ['image/png', ONE_PIXEL],
    ['image/png', ONE_PIXEL],
    ['application/javascript', '1'],
    ['application/geo+json', { type: 'Point', coordinates: [0, 0] }],
  ];
  assert.equal(displays.length, expected.length);
  for (const [index, [mime, content]] of expected.entries()) {
    const data = displays[index]?.data ?? {};
    const found = mime.startsWith('image/png') ? String(data[mime]).trim() : data[mime];
    assert.deepEqual(found, content, mime);
    assert.ok(typeof data['text/plain'] === 'string', `${mime} has a text too`);
  }
  assert.deepEqual(displays[7]?.metadata, { 'image/png': { width: 10 } });
});

test("the plain shell's display() takes values, ready bundles and metadata", { skip }, async (t) => {
  const kernel = kernelOf(t, 'plain');
  const code = [
    'class Both:',
    '    def _repr_html_(self): return "<i/>"',
    '    def _repr_mimebundle_(self, include=None, exclude=None): return {"application/json": {"a": 1}}, {"x": 1}',
    'display(Both(), 7)',
    'display({"text/markdown": "# t"}, raw=True, metadata={"y": 2})',
  ].join('\n');
  const { displays } = await ok(kernel, code);
  assert.deepEqual(displays[0]?.data['application/json'], { a: 1 });
  assert.equal(displays[0]?.data['text/html'], '<i/>');
  assert.deepEqual(displays[0]?.metadata, { x: 1 });
  assert.deepEqual(displays[1]?.data, { 'text/plain': '7' });
  assert.deepEqual([displays[2]?.data, displays[2]?.metadata], [{ 'text/markdown': '# t' }, { y: 2 }]);
});

test('widgets without a front end: shown once as text, the loop runs on; without ipywidgets the error says so', {
  skip,
}, async (t) => {
  const kernel = kernelOf(t, 'ipython');
  const loop = 'from tqdm.notebook import tqdm\nn = 0\nfor _ in tqdm(range(3)): n += 1\nprint(n)';
  const bar = await ok(kernel, loop);
  assert.match(bar.stdout, /^3$/m);
  const [shown] = dataOf(bar);
  assert.match(String(shown?.['text/plain']), /0\/3/);
  assert.ok('application/vnd.jupyter.widget-view+json' in (shown ?? {}));
  const slider = await ok(kernel, 'import ipywidgets\nipywidgets.IntSlider(value=4)');
  assert.equal(slider.text, 'IntSlider(value=4)');

  const without = kernelOf(t, 'ipython');
  const failed = await without.execute(`import sys; sys.modules["ipywidgets"] = None\n${loop}`);
  assert.equal(failed.error?.name, 'ImportError');
  assert.match(failed.error?.value ?? '', /ipywidgets/);
});

const ONE_PIXEL = 'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==';
