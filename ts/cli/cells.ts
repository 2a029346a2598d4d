/** A Python file in cells: each line that begins with "# %%" begins one. */

/** The cells with something in them. A marker stays in its cell: it is a comment. */
export function splitCells(source: string): string[] {
  const cells: string[][] = [[]];
  for (const line of source.split(/(?<=\n)/)) {
    if (/^# ?%%/.test(line)) cells.push([]);
    cells.at(-1)?.push(line);
  }
  return cells.map((lines) => lines.join('')).filter((cell) => /^(?!\s*(#.*)?$)/m.test(cell));
}
