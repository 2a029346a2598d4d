/** The environment of a kernel, as the exact list the addon gives to the process. */

import type { EnvironmentVariable } from './native.ts';

/** What `env` and `inheritEnv` come to once they are valid. */
export interface EnvironmentOptions {
  env: Readonly<Record<string, string | undefined>> | undefined;
  inheritEnv: 'all' | readonly string[] | undefined;
}

/**
 * | `env` | `inheritEnv` | the kernel's environment                            |
 * |-------|--------------|-----------------------------------------------------|
 * | –     | –            | the daemon's                                        |
 * | given | –            | exactly `env`                                       |
 * | –     | 'all'        | the daemon's                                        |
 * | given | 'all'        | the daemon's, changed by `env` (`undefined` deletes)|
 * | any   | names        | these of the daemon's, changed by `env`             |
 */
export function kernelEnvironment(
  { env, inheritEnv }: EnvironmentOptions,
  daemon: NodeJS.ProcessEnv,
): EnvironmentVariable[] {
  const inherited = inheritEnv ?? (env === undefined ? 'all' : []);
  const names = inherited === 'all' ? Object.keys(daemon) : inherited;
  const variables = new Map<string, string>();
  for (const name of names) {
    const value = daemon[name];
    if (value !== undefined) variables.set(name, value);
  }
  for (const [name, value] of Object.entries(env ?? {})) {
    if (value === undefined) variables.delete(name);
    else variables.set(name, value);
  }
  return Array.from(variables, ([name, value]) => ({ name, value }));
}
