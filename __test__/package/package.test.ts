/** The package as a user gets it: packed, installed into an empty folder, imported there, one cell run. */

import assert from 'node:assert/strict';
import { execFileSync } from 'node:child_process';
import { copyFileSync, cpSync, existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { type TestContext, test } from 'node:test';
import { temporaryFolder } from '../helpers/index.ts';

const root = join(import.meta.dirname, '../..');
const platform = `linux-${process.arch}-gnu`;
const addon = `kernelhost.${platform}.node`;
const MAX_PACKED_BYTES = 2 * 1024 * 1024;
const MAX_LOAD_MS = 30;

interface Packed {
  filename: string;
  size: number;
  files: { path: string }[];
}

function npm(args: string[], cwd: string): string {
  return execFileSync('npm', args, { cwd, encoding: 'utf8', stdio: ['ignore', 'pipe', 'pipe'], timeout: 240_000 });
}

/** The scripts are left out: what they would build is built. */
function pack(folder: string, destination: string): { tarball: string; packed: Packed } {
  const printed = npm(['pack', '--json', '--ignore-scripts', '--pack-destination', destination], folder);
  const parsed = JSON.parse(printed) as Packed[] | Record<string, Packed>;
  const packed = Object.values(parsed)[0];
  assert.ok(packed);
  return { tarball: join(destination, packed.filename), packed };
}

/** Installs tarballs where there is nothing, without a registry. */
function install(t: TestContext, tarballs: string[]): string {
  const folder = temporaryFolder(t);
  writeFileSync(join(folder, 'package.json'), '{ "private": true, "type": "module" }');
  npm(['install', '--offline', '--no-audit', '--no-fund', ...tarballs], folder);
  return folder;
}

function useFrom(folder: string): { text: string; python: string; loadMs: number } {
  const script = `
    const begun = performance.now();
    const { KernelHost } = await import('kernelhost');
    const host = new KernelHost();
    const loadMs = performance.now() - begun;
    const { text, life } = await host.kernel().execute('6 * 7');
    await host.close();
    console.log(JSON.stringify({ text, python: life.python, loadMs }));
  `;
  writeFileSync(join(folder, 'use.mjs'), script);
  const printed = execFileSync(process.execPath, ['use.mjs'], { cwd: folder, encoding: 'utf8', timeout: 60_000 });
  return JSON.parse(printed);
}

test('the tarball holds what is needed and nothing else', (t) => {
  const { packed } = pack(root, temporaryFolder(t));
  const allowed = [
    /^(package\.json|README\.md|LICENSE|index\.js|index\.d\.ts)$/,
    /^dist\/((cli|monitor)\/)?[a-z-]+\.(js|d\.ts)$/,
    new RegExp(`^native/(native\\.cjs|native\\.d\\.cts|${addon.replaceAll('.', '\\.')})$`),
    /^python\/(boot\.py|kernelhost\/([a-z_]+\/)*[a-z_]+\.py)$/,
  ];
  const strange = packed.files.map(({ path }) => path).filter((path) => !allowed.some((each) => each.test(path)));
  assert.deepEqual(strange, []);
  assert.ok(packed.size <= MAX_PACKED_BYTES, `${packed.size} bytes`);
});

test('the tarball alone, as packed where the addon was built, works in an empty folder', (t) => {
  const folder = install(t, [pack(root, temporaryFolder(t)).tarball]);
  const { text, loadMs } = useFrom(folder);
  assert.equal(text, '42');
  t.diagnostic(`import and first host: ${loadMs.toFixed(1)} ms (aim: ${MAX_LOAD_MS} ms)`);
  const command = join(folder, 'node_modules/.bin/kernelhost');
  assert.match(execFileSync(command, ['--version'], { encoding: 'utf8' }), /^\d/);
});

test('the release, main and platform package apart, works in an empty folder', (t) => {
  const stage = temporaryFolder(t);
  const main = join(stage, 'main');
  mkdirSync(main);
  const { files } = pack(root, stage).packed;
  for (const { path } of files) {
    if (path.endsWith('.node')) continue;
    cpSync(join(root, path), join(main, path), { recursive: true });
  }
  const addonPackage = join(stage, platform);
  cpSync(join(root, 'npm', platform), addonPackage, { recursive: true });
  copyFileSync(join(root, 'native', addon), join(addonPackage, addon));
  const folder = install(t, [pack(main, stage).tarball, pack(addonPackage, stage).tarball]);
  assert.ok(!existsSync(join(folder, 'node_modules/kernelhost/native', addon)));
  assert.equal(useFrom(folder).text, '42');
});

test('main package without an addon fails with one error that names the fix', (t) => {
  const stage = temporaryFolder(t);
  const main = join(stage, 'main');
  mkdirSync(main);
  for (const { path } of pack(root, stage).packed.files) {
    if (!path.endsWith('.node')) cpSync(join(root, path), join(main, path), { recursive: true });
  }
  const folder = install(t, [pack(main, stage).tarball]);
  const script = `import('kernelhost').then(({ KernelHost }) => new KernelHost()).catch((error) => console.log(error.code, error.message))`;
  const printed = execFileSync(process.execPath, ['-e', script], { cwd: folder, encoding: 'utf8' });
  assert.match(
    printed,
    /^ERR_ADDON_NOT_LOADED .*Tried native\/kernelhost\..*npm install --include=optional kernelhost/,
  );
});

test('the manifests agree with each other', () => {
  const manifest = (path: string) => JSON.parse(readFileSync(join(root, path, 'package.json'), 'utf8'));
  const main = manifest('.');
  assert.deepEqual(main.os, ['linux']);
  assert.equal(main.license, 'MIT');
  assert.equal(main.dependencies, undefined);
  for (const name of ['linux-x64-gnu', 'linux-arm64-gnu']) {
    const { version, license, engines, main: file, name: packageName } = manifest(`npm/${name}`);
    assert.deepEqual(
      { version, license, engines },
      { version: main.version, license: main.license, engines: main.engines },
    );
    assert.equal(packageName, `kernelhost-${name}`);
    assert.equal(file, `kernelhost.${name}.node`);
  }
  assert.match(readFileSync(join(root, 'Cargo.toml'), 'utf8'), new RegExp(`^version = "${main.version}"`, 'm'));
});
