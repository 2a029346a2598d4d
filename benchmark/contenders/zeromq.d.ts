/** The part of zeromq's API that is used here, so that type checks do not need the benchmark's packages. */
declare module 'zeromq' {
  interface SocketOptions {
    linger?: number;
    reconnectInterval?: number;
    receiveHighWaterMark?: number;
  }

  class ReadableSocket implements AsyncIterable<Buffer[]> {
    constructor(options?: SocketOptions);
    connect(address: string): void;
    close(): void;
    [Symbol.asyncIterator](): AsyncIterator<Buffer[]>;
  }

  export class Dealer extends ReadableSocket {
    send(frames: readonly Buffer[]): Promise<void>;
  }

  export class Subscriber extends ReadableSocket {
    subscribe(): void;
  }
}
