//! Which kernels may share a template: those that agree in all that is read before user code runs.

use crate::protocol::Shell;

/// One template per profile.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Profile {
    pub interpreter: String,
    pub shell: Shell,
    pub preload: Vec<String>,
    /// The start-up part of the environment, sorted.
    pub environment: Vec<(String, String)>,
}

/// Variables that the dynamic loader, the C library, the interpreter, or a native pool reads once, by the start of their names.
/// A fork comes too late for them.
const STARTUP_PREFIXES: [&str; 15] = [
    "PYTHON",
    "LD_",
    "LC_",
    "MALLOC_",
    "GLIBC_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "OPENBLAS_",
    "MKL_",
    "BLIS_",
    "NUMEXPR_",
    "IPYTHON",
    "JUPYTER",
    "MPL",
];
const STARTUP_NAMES: [&str; 6] = [
    "LANG",
    "LANGUAGE",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "HOME",
    "XDG_CONFIG_HOME",
];
/// What a template needs besides to import things as a user would. Not part of the profile: a fork sets it right.
const TEMPLATE_NAMES: [&str; 5] = ["PATH", "TMPDIR", "USER", "LOGNAME", "TZ"];

impl Profile {
    pub fn new(interpreter: &str, shell: Shell, preload: &[String], environment: &[(String, String)]) -> Self {
        let mut environment: Vec<_> = environment
            .iter()
            .filter(|(name, _)| is_startup(name))
            .cloned()
            .collect();
        environment.sort();
        Self {
            interpreter: interpreter.to_owned(),
            shell,
            preload: preload.to_vec(),
            environment,
        }
    }

    /// The environment of the template itself. Nothing else of the daemon's or a kernel's environment goes there: every kernel
    /// can read it.
    pub fn template_environment(&self, kernel_environment: &[(String, String)]) -> Vec<(String, String)> {
        let needed = kernel_environment
            .iter()
            .filter(|(name, _)| TEMPLATE_NAMES.contains(&name.as_str()));
        self.environment.iter().chain(needed).cloned().collect()
    }
}

fn is_startup(name: &str) -> bool {
    STARTUP_NAMES.contains(&name) || STARTUP_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn kernels_that_differ_in_start_up_variables_only_get_different_profiles() {
        let profile = |env: &[(&str, &str)]| Profile::new("python3", Shell::Auto, &[], &pairs(env));
        let base = profile(&[("PATH", "/bin"), ("LANG", "C")]);
        assert_eq!(
            base,
            profile(&[("LANG", "C"), ("PATH", "/usr/bin"), ("API_KEY", "x"), ("TZ", "UTC")])
        );
        for variable in [
            "PYTHONHASHSEED",
            "PYTHONPATH",
            "LC_ALL",
            "LD_LIBRARY_PATH",
            "OMP_NUM_THREADS",
            "MPLBACKEND",
        ] {
            assert_ne!(base, profile(&[("LANG", "C"), (variable, "1")]), "{variable}");
        }
        assert_ne!(base, profile(&[]));
    }

    #[test]
    fn a_template_is_not_given_what_only_its_kernels_may_know() {
        let environment = pairs(&[
            ("PATH", "/bin"),
            ("API_KEY", "secret"),
            ("PYTHONPATH", "/x"),
            ("TMPDIR", "/t"),
        ]);
        let profile = Profile::new("python3", Shell::Auto, &[], &environment);
        let names: Vec<_> = profile
            .template_environment(&environment)
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        assert_eq!(names, ["PYTHONPATH", "PATH", "TMPDIR"]);
    }
}
