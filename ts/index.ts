/** The public API. */

export type { Checkpoint } from './checkpoints.ts';
export type { ExecuteTrace, ExitMessage, StartTrace } from './diagnostics.ts';
export {
  type ErrorCode,
  InvalidOptionError,
  KernelAbsentError,
  KernelBusyError,
  KernelClosedError,
  KernelDiedError,
  KernelHostError,
  KernelStartError,
  SnapshotError,
  type SnapshotFailure,
  UnsupportedPlatformError,
} from './errors.ts';
export type { ExitCause, ExitReason, ExitStatus, LeftoverProcess, Leftovers } from './exit-reason.ts';
export type { HostCallContext, HostCallHandler, InputHandler } from './host-calls.ts';
export { Kernel, type KernelEvents, type KernelState, type Usage, type Warning } from './kernel.ts';
export { KernelHost, type KernelHostEvents, type TemplateInfo } from './kernel-host.ts';
export {
  type Notebook,
  type NotebookCell,
  type NotebookCodeCell,
  type NotebookEntry,
  type NotebookMarkdownCell,
  type NotebookOptions,
  type NotebookOutput,
  type NotebookResult,
  type NotebookText,
  toNotebook,
  toNotebookCell,
} from './notebook.ts';
export type {
  CloseOptions,
  ExecuteOptions,
  KernelHostOptions,
  KernelOptions,
  Limits,
  StartOptions,
} from './options.ts';
export type { Completeness, Completion, Inspection } from './queries.ts';
export type { CellResult, Display, Life, MimeBundle, Output, Recovered } from './result.ts';
export type { SaveOptions, SaveTo, SnapshotReport } from './snapshots.ts';
export type { CellStream } from './stream.ts';
