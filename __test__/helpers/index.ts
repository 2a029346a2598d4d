export { next, until, within } from './deadline.ts';
export {
  assertNoOrphans,
  type HostForTest,
  startHost,
  startKernel,
  type TestContext,
  temporaryFolder,
} from './host.ts';
export {
  allProcesses,
  commandLine,
  descriptorCount,
  isAlive,
  isGone,
  type ProcessStat,
  processStat,
} from './processes.ts';
export {
  dillForTests,
  hasModule,
  lacksLibraries,
  librariesPythonForTests,
  plainPythonForTests,
  pythonForTests,
  pythonVersion,
} from './pythons.ts';
