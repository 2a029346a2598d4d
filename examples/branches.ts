/**
 * Ten ways tried at once: one kernel loads the data, ten forks of it try a way each, the best is kept and goes on, the others end.
 * `node examples/branches.ts` prints what each has come to, and which has won.
 */

import { type Kernel, KernelHost } from 'kernelhost';

// What takes long and is needed by all: done once.
const PREPARE = `
import math, random
made = random.Random(7)
points = [(x / 50, math.sin(x / 10) + made.gauss(0, 0.1)) for x in range(500)]

def steps(width):
    """A curve of averages over pieces of this width, and how far the points are from it."""
    pieces = {}
    for x, y in points: pieces.setdefault(int(x / width), []).append(y)
    means = {piece: sum(ys) / len(ys) for piece, ys in pieces.items()}
    error = sum((y - means[int(x / width)]) ** 2 for x, y in points) / len(points)
    return means, error + 0.002 * len(means)
`;

const widths = [0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5];

async function attempt(prepared: Kernel, width: number) {
  const kernel = await prepared.fork();
  const { text } = await kernel.execute(`model, cost = steps(${width})\ncost`);
  return { kernel, width, cost: Number(text) };
}

const host = new KernelHost({ launch: 'fork' });
const prepared = host.kernel();
await prepared.execute(PREPARE);

const attempts = await Promise.all(widths.map((width) => attempt(prepared, width)));
attempts.sort((one, other) => one.cost - other.cost);
for (const { width, cost } of attempts) console.log(`width ${width}: cost ${cost.toFixed(4)}`);

const [best, ...others] = attempts;
if (best === undefined) throw new Error('there were no attempts');
await Promise.all(others.map(({ kernel }) => kernel.close()));
// The winner has its model, and the data, and goes on from there.
const { text } = await best.kernel.execute('len(points), len(model)');
console.log(`kept width ${best.width}: ${text} points and pieces; ${host.kernels.length} kernels are left`);
await host.close();
