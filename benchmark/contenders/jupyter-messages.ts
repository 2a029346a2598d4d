/** Jupyter messages as frames: signed on the way out, verified on the way in. Knows no sockets. */
import { createHmac, randomUUID, timingSafeEqual } from 'node:crypto';

export interface JupyterMessage {
  header: { msg_id: string; msg_type: string };
  parent_header: { msg_id?: string };
  content: Record<string, unknown>;
}

const delimiter = Buffer.from('<IDS|MSG>');

export class JupyterMessages {
  readonly #key: string;
  readonly #session = randomUUID();
  #sent = 0;

  constructor(key: string) {
    this.#key = key;
  }

  encode(type: string, content: Record<string, unknown>): { id: string; frames: Buffer[] } {
    const id = `${this.#session}_${this.#sent}`;
    this.#sent += 1;
    const header = {
      msg_id: id,
      msg_type: type,
      session: this.#session,
      username: 'daemon',
      date: new Date().toISOString(),
      version: '5.4',
    };
    const parts = [header, {}, {}, content].map((part) => Buffer.from(JSON.stringify(part)));
    return { id, frames: [delimiter, Buffer.from(this.#sign(parts)), ...parts] };
  }

  decode(frames: readonly Buffer[]): JupyterMessage {
    const start = frames.findIndex((frame) => frame.equals(delimiter)) + 1;
    const [signature, ...parts] = frames.slice(start, start + 5);
    const [header, parent, , content] = parts;
    if (start === 0 || !signature || !header || !parent || !content) throw new Error('not a Jupyter message');
    const expected = Buffer.from(this.#sign(parts));
    if (signature.length !== expected.length || !timingSafeEqual(signature, expected)) {
      throw new Error('a message with a wrong signature');
    }
    return {
      header: JSON.parse(header.toString()),
      parent_header: JSON.parse(parent.toString()),
      content: JSON.parse(content.toString()),
    };
  }

  #sign(parts: readonly Buffer[]): string {
    const hmac = createHmac('sha256', this.#key);
    for (const part of parts) hmac.update(part);
    return hmac.digest('hex');
  }
}
