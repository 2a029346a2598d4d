//! What procfs tells of processes, as proc(5) numbers the fields of `/proc/<pid>/stat`.

use std::fs;

use crate::reap::ExitStatus;

/// One process, at the moment of the look.
pub(crate) struct Stat {
    pub state: char,
    pub process_group: i32,
    pub cpu_ticks: u64,
    pub threads: u32,
    /// As `waitpid` would report it; meaningful for a zombie.
    pub exit_status: ExitStatus,
}

impl Stat {
    pub(crate) fn read(pid: i32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The command name, in parentheses, may hold anything, also spaces and parentheses.
        let fields: Vec<&str> = stat.get(stat.rfind(')')? + 2..)?.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).copied();
        Some(Self {
            state: field(3)?.chars().next()?,
            process_group: field(5)?.parse().ok()?,
            cpu_ticks: field(14)?.parse::<u64>().ok()? + field(15)?.parse::<u64>().ok()?,
            threads: field(20)?.parse().ok()?,
            exit_status: ExitStatus::from_wait(field(52)?.parse().ok()?),
        })
    }

    pub(crate) fn is_zombie(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

/// All members of a process group.
pub(crate) fn members(process_group: i32) -> impl Iterator<Item = Stat> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(Stat::read)
        .filter(move |stat| stat.process_group == process_group)
}

pub(crate) fn group_has_living_member(process_group: i32) -> bool {
    members(process_group).any(|member| !member.is_zombie())
}
