/** The round trip of a call from a cell into the daemon, which other contenders have nothing to compare with. */
import type { KernelHost } from '../../index.js';
import type { Answers } from './protocol.ts';

export async function hostCalls(host: KernelHost, count: number): Promise<Answers['host-calls']> {
  const kernel = host.kernel({ onCall: { echo: (args) => args } });
  const code = `
import json, kernelhost, time
def timed():
    began = time.perf_counter()
    kernelhost.call("echo", {"a": 1})
    return (time.perf_counter() - began) * 1e3
for _ in range(50): timed()
print(json.dumps([timed() for _ in range(${count})]))`;
  const { stdout } = await kernel.execute(code);
  await kernel.close({ graceMs: 0 });
  return { ms: JSON.parse(stdout) as number[] };
}
