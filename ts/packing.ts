/**
 * Values with bytes in them, as they cross the wire of calls: JSON with nothing in the places of bytes, and the bytes.
 *
 * Knows nothing of handlers. What comes from a kernel is checked: a cell can send whatever it likes.
 */

/** The largest frame; see docs/protocol.md. */
const MAX_PAYLOAD_BYTES = 64 * 1024 * 1024;

type Place = [path: (string | number)[], length: number];

/** A header under this name, and the bytes it announces. Throws a TypeError for what cannot be sent. */
export function pack(name: string, value: unknown): { header: string; parts: Buffer[] } {
  let holdsBytes = false;
  // Also `undefined`, which JSON has no word for.
  let json = JSON.stringify(value, function (this: Record<string, unknown>, key, converted: unknown) {
    // A Buffer has been turned into an object of numbers before this is called.
    if (!isBytes(this[key])) return converted;
    holdsBytes = true;
    return null;
  });
  const places: Place[] = [];
  const parts: Buffer[] = [];
  if (holdsBytes) json = JSON.stringify(lift(value, [], places, parts));
  const header = `{"${name}":${json ?? 'null'},"places":${JSON.stringify(places)}}`;
  const bytes = parts.reduce((sum, part) => sum + part.length, 4 + Buffer.byteLength(header));
  if (bytes > MAX_PAYLOAD_BYTES) {
    throw new RangeError(
      `${bytes} bytes are too many to be sent to a kernel at once; the limit is ${MAX_PAYLOAD_BYTES}`,
    );
  }
  return { header, parts };
}

/** The value again. Its bytes are views of `bytes`, not copies. */
export function unpack(json: string, placesJson: string, bytes: Uint8Array): unknown {
  const whole = { value: JSON.parse(json) as unknown };
  let end = 0;
  for (const [path, length] of JSON.parse(placesJson) as Place[]) {
    const part = bytes.subarray(end, end + length);
    end += length;
    let holder = whole as Record<string | number, unknown>;
    let key: string | number = 'value';
    for (const step of path) {
      const next = holder[key];
      const isThere = typeof next === 'object' && next !== null && isKey(step) && Object.hasOwn(next, step);
      if (!isThere) throw new TypeError('its bytes have no place');
      holder = next as Record<string | number, unknown>;
      key = step;
    }
    // Only null was put there for them.
    if (holder[key] !== null) throw new TypeError('its bytes have no place');
    holder[key] = part;
  }
  return whole.value;
}

function isKey(step: unknown): step is string | number {
  return typeof step === 'string' || typeof step === 'number';
}

function isBytes(value: unknown): value is ArrayBuffer | SharedArrayBuffer | ArrayBufferView {
  return ArrayBuffer.isView(value) || value instanceof ArrayBuffer || value instanceof SharedArrayBuffer;
}

function lift(value: unknown, path: Place[0], places: Place[], parts: Buffer[]): unknown {
  if (isBytes(value)) {
    const part = ArrayBuffer.isView(value)
      ? Buffer.from(value.buffer, value.byteOffset, value.byteLength)
      : Buffer.from(value as ArrayBuffer);
    places.push([path, part.length]);
    parts.push(part);
    return null;
  }
  if (Array.isArray(value)) return value.map((each, at) => lift(each, [...path, at], places, parts));
  if (typeof value !== 'object' || value === null) return value;
  if ('toJSON' in value && typeof value.toJSON === 'function') return value;
  return Object.fromEntries(
    Object.entries(value).map(([key, each]) => [key, lift(each, [...path, key], places, parts)]),
  );
}
