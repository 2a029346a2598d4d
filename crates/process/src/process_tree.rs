//! All that a life has started: found, ended, confirmed gone, told.
//!
//! A process belongs to the tree of a life when it is in the life's process group or session, carries the life's marker, or
//! descends from one that does. No pid is kept from one look to the next: every look starts from what is there, and a signal
//! goes through a pidfd of a process that is still the one that was found.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::time::{Duration, Instant};

use crate::marker::{self, Belonging};
use crate::pidfd::Pidfd;
use crate::procfs::{self, Stat};
use crate::urgency::Urgent;
use crate::usage;

/// Whose tree is meant.
#[derive(Debug, Clone)]
pub struct Root {
    /// The life itself; it is not part of its tree.
    pub pid: i32,
    /// Nobody has reaped the life yet, so its pid still names its group and its session.
    pub holds_pid: bool,
    pub marker: String,
    /// The process to which orphans come that left the group, if it is known.
    pub adopter: Option<Adopter>,
}

/// A pid and the start time that make up one process for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    pub pid: i32,
    start: u64,
}

impl Identity {
    /// Of a process that cannot be reaped meanwhile.
    pub fn of(pid: i32) -> Option<Self> {
        Stat::read(pid).map(|stat| Self::seen(&stat))
    }

    fn seen(stat: &Stat) -> Self {
        Self {
            pid: stat.pid,
            start: stat.start,
        }
    }

    fn is_there(self) -> bool {
        Self::of(self.pid) == Some(self)
    }
}

/// A process that takes the orphans of several lives to itself.
#[derive(Debug, Clone)]
pub struct Adopter {
    pub process: Identity,
    /// Its own children, which are no orphans.
    pub own_children: HashSet<i32>,
    /// The root is the last of its lives: an orphan that carries no marker can be nobody else's.
    pub last_life: bool,
}

/// What of a tree was still there after its life had ended.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Leftovers {
    /// Had to be ended.
    pub ended: Vec<Leftover>,
    /// Could not be ended in time.
    pub remaining: Vec<Remaining>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftover {
    pub pid: i32,
    /// The command line.
    pub command: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remaining {
    pub process: Leftover,
    pub why: String,
}

/// How hard a tree is ended.
#[derive(Debug, Clone, Copy)]
pub struct Manner {
    /// Time between SIGTERM and SIGKILL; zero: no SIGTERM.
    pub grace: Duration,
    /// When to give up.
    pub limit: Duration,
}

/// A tracker of `multiprocessing` removes what its processes have left in shared memory, and leaves by itself once they are
/// gone: it is given this long.
const TRACKER_GRACE: Duration = Duration::from_millis(500);
/// A machine that stands still for seconds has given nobody the time to die.
const LEAST_LOOKS: u32 = 20;
/// An ordinary tree has nothing new after so many looks.
const SOBER_LOOKS: u32 = 2;
/// So many may be about to become more.
const CROWD: usize = 32;
const FREEZING_LOOKS: u32 = 50;
/// Further looks that find nothing before a tree that had something is taken to be gone.
const QUIET_LOOKS: u32 = 2;
/// Looks at the adopter alone, between two at all processes: so many, and so many once there was something.
const ADOPTED_LOOKS: u32 = 20;
const MANY_ADOPTED_LOOKS: u32 = 400;
/// Forks of the whole machine during one look that say nothing.
const CALM_FORKS: u64 = 4;
const CALM_LIMIT: Duration = Duration::from_millis(800);
const TRACKER: &str = "multiprocessing.resource_tracker";

/// What has been found of a tree, and what has been done about it.
struct Member {
    pid: i32,
    /// As it was first seen: what is dying has none any more.
    command: String,
    asked: bool,
    refused: Option<io::Error>,
    /// A tracker that has not been signalled.
    left_to_itself: bool,
}

impl Member {
    fn new(pid: i32) -> Self {
        Self {
            pid,
            command: procfs::command(pid),
            asked: false,
            refused: None,
            left_to_itself: false,
        }
    }

    fn is_tracker(&self) -> bool {
        self.command.contains(TRACKER)
    }

    fn leftover(&self) -> Leftover {
        Leftover {
            pid: self.pid,
            command: self.command.clone(),
        }
    }
}

/// Signals the process that was looked at, and nobody who has got its pid since.
fn signal(process: Identity, number: i32) -> io::Result<bool> {
    let pidfd = match Pidfd::open(process.pid) {
        Ok(pidfd) => pidfd,
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return Ok(false),
        Err(error) => return Err(error),
    };
    // The same start time after the pidfd was opened: so it is of that very process.
    if process.is_there() {
        pidfd.signal(number)
    } else {
        Ok(false)
    }
}

/// Whether anything can be left of a tree whose life has ended, from a look that costs next to nothing. `true` where that look
/// cannot tell.
pub fn may_have_members(root: &Root) -> bool {
    let Some(Adopter {
        process, own_children, ..
    }) = &root.adopter
    else {
        return true;
    };
    // The children of a process are handed to their adopter before its end can be seen.
    let children = procfs::children(process.pid).filter(|_| process.is_there());
    children.is_none_or(|children| children.iter().any(|child| !own_children.contains(child)))
}

/// How many processes a tree has, its life included, and what they have in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Size {
    pub processes: u32,
    /// Resident memory that is no file's, in bytes.
    pub memory_bytes: u64,
    /// What the life's own process has asked for, in bytes, as `RLIMIT_DATA` counts it.
    pub data_bytes: u64,
}

/// Measures a tree whose life is running. What processes share is counted for each of them, unless the sum is more than
/// `exact_from`: then the page tables are looked at, which takes longer, and it is counted once. A tree of more processes than
/// `most` is stopped at once: it may be one that takes all there is until it is ended.
pub fn measure(root: &Root, exact_from: u64, most: u32) -> Size {
    let pids = living(root);
    let processes = u32::try_from(pids.len()).unwrap_or(u32::MAX);
    if processes > most {
        freeze(root);
        return Size {
            processes,
            ..Size::default()
        };
    }
    let memory: Vec<usage::Memory> = pids.iter().filter_map(|pid| usage::memory(*pid)).collect();
    let mut memory_bytes = memory.iter().map(|memory| memory.resident).sum();
    if memory_bytes > exact_from {
        memory_bytes = pids.iter().filter_map(|pid| usage::memory_by_share(*pid)).sum();
    }
    Size {
        processes,
        memory_bytes,
        // The life itself comes first.
        data_bytes: memory.first().map_or(0, |memory| memory.data),
    }
}

/// How many processes the tree of a running life has, that life included.
pub fn count(root: &Root) -> u32 {
    u32::try_from(living(root).len()).unwrap_or(u32::MAX)
}

/// The tree of a life that is running, that life first: from parent to child, because that costs less than a look at every
/// process of the machine.
fn living(root: &Root) -> Vec<i32> {
    let adopter = root.adopter.as_ref().filter(|adopter| adopter.process.is_there());
    let adopted = adopter.and_then(|adopter| {
        let children = procfs::children(adopter.process.pid)?;
        Some(
            children
                .into_iter()
                .filter(|pid| !adopter.own_children.contains(pid))
                .collect::<Vec<_>>(),
        )
    });
    let Some(adopted) = adopted else {
        return [root.pid]
            .into_iter()
            .chain(find(root).into_iter().map(|stat| stat.pid))
            .collect();
    };
    let mut pids = vec![root.pid];
    pids.extend(adopted.into_iter().filter(|pid| claims(root, *pid)));
    let mut known: HashSet<i32> = pids.iter().copied().collect();
    let mut at = 0;
    while let Some(pid) = pids.get(at) {
        let children = procfs::children_of_all_threads(*pid);
        pids.extend(children.into_iter().filter(|child| known.insert(*child)));
        at += 1;
    }
    pids
}

/// Whether one process belongs to a tree, as far as itself and its parent tell. It may be dying.
pub fn claims(root: &Root, pid: i32) -> bool {
    let by_marker = match marker::belonging(pid) {
        Belonging::Marked { marker, .. } => marker == root.marker,
        Belonging::Unmarked { .. } | Belonging::Hidden => false,
    };
    let by_kin = |stat: Stat| [stat.process_group, stat.session, stat.parent].contains(&root.pid);
    by_marker || root.holds_pid && Stat::read(pid).is_some_and(by_kin)
}

/// Ends all that is left of a tree whose life has ended. Blocks until it is gone, or until the limit.
pub fn end(root: &Root, manner: Manner) -> Leftovers {
    let began = Instant::now();
    let mut seen: BTreeMap<Identity, Member> = BTreeMap::new();
    let mut pause = Duration::from_millis(1);
    let mut only_trackers_since = None;
    let mut looks = 0;
    let mut quiet_looks = 0;
    loop {
        let forks_before = procfs::forks();
        let found = find(root);
        if found.is_empty() {
            // What forks and leaves all the time can be missed by a look; so one that had something is not believed at once.
            let had_nothing = seen.is_empty();
            if quiet_looks == QUIET_LOOKS || had_nothing && root.adopter.is_none() {
                return told(&seen, &[]);
            }
            // What moves from pid to pid shows in the machine's count of forks; others' forks are not waited for too long.
            let restless = procfs::forks().saturating_sub(forks_before) > CALM_FORKS && began.elapsed() < CALM_LIMIT;
            let tries = match (had_nothing, restless) {
                // Most likely only new lives of others, which came to the adopter since. Where somebody forks all the time it may
                // be this tree, and one look would miss it.
                (true, false) => 1,
                (true, true) | (false, false) => ADOPTED_LOOKS,
                (false, true) => MANY_ADOPTED_LOOKS,
            };
            let caught = end_adopted(root, tries, &mut seen);
            if had_nothing && !caught {
                return told(&seen, &[]);
            }
            quiet_looks = if caught || restless { 0 } else { quiet_looks + 1 };
            continue;
        }
        (looks, quiet_looks) = (looks + 1, 0);
        let grows = found.iter().any(|stat| !seen.contains_key(&Identity::seen(stat)));
        // Before their command lines are read, which waits for whoever is in the middle of a fork.
        if found.len() > CROWD || looks > SOBER_LOOKS && grows {
            freeze(root);
        }
        for stat in &found {
            seen.entry(Identity::seen(stat))
                .or_insert_with(|| Member::new(stat.pid));
        }
        let is_tracker = |stat: &Stat| seen.get(&Identity::seen(stat)).is_some_and(Member::is_tracker);
        let only_trackers = found.iter().all(is_tracker);
        let trackers_may_stay =
            !only_trackers || only_trackers_since.get_or_insert_with(Instant::now).elapsed() < TRACKER_GRACE;
        let number = if began.elapsed() < manner.grace {
            libc::SIGTERM
        } else {
            libc::SIGKILL
        };
        for stat in &found {
            let process = Identity::seen(stat);
            let Some(member) = seen.get_mut(&process) else { continue };
            member.left_to_itself = member.is_tracker() && trackers_may_stay;
            // SIGTERM is said once; SIGKILL again and again, to what forks faster than it is looked at.
            if !member.left_to_itself && (number == libc::SIGKILL || !member.asked) {
                member.asked = true;
                member.refused = signal(process, number).err();
            }
        }
        if began.elapsed() >= manner.limit && looks >= LEAST_LOOKS {
            return told(&seen, &found);
        }
        wait(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Stops everything of a tree that multiplies faster than it is found: what is stopped cannot fork, and keeps its place where
/// there is a limit of processes. Each is stopped as soon as it is seen, by what its parent is where that says enough: an
/// environment cannot be read while its process forks, and on a machine that is busy with forks that takes its time. So
/// environments come last, when nobody is left who can be told without.
fn freeze(root: &Root) {
    // Hundreds that fork without end leave nobody else a share of the CPU worth speaking of.
    let _urgent = Urgent::begin();
    // A busy machine takes its time to stop what has been told to; from that moment on it does not fork any more.
    let mut told = HashSet::new();
    let mut members: HashSet<i32> = root.holds_pid.then_some(root.pid).into_iter().collect();
    let mut by_parent = Vec::new();
    for _ in 0..FREEZING_LOOKS {
        let before = told.len();
        let mut others = Vec::new();
        for stat in procfs::all() {
            if stat.is_zombie() || matches!(stat.state, 'T' | 't') || told.contains(&Identity::seen(&stat)) {
                continue;
            }
            let by_kin = root.holds_pid && [stat.process_group, stat.session].contains(&root.pid);
            if by_kin || members.contains(&stat.parent) {
                let process = Identity::seen(&stat);
                signal(process, libc::SIGSTOP).ok();
                told.insert(process);
                members.insert(stat.pid);
                if !by_kin {
                    by_parent.push(process);
                }
            } else {
                others.push(stat);
            }
        }
        if told.len() > before {
            continue;
        }
        for stat in others.iter().filter(|stat| carries_marker(root, stat.pid)) {
            let process = Identity::seen(stat);
            signal(process, libc::SIGSTOP).ok();
            told.insert(process);
            members.insert(stat.pid);
        }
        if told.len() == before {
            break;
        }
    }
    // Only now that nobody forks can it be read who has opted out.
    for process in by_parent {
        if let Belonging::Marked { detached: true, .. } | Belonging::Unmarked { detached: true } =
            marker::belonging(process.pid)
        {
            signal(process, libc::SIGCONT).ok();
        }
    }
}

/// Ends what the adopter has been handed of this tree, again and again without a pause: a look at one list of children is
/// quick enough to catch what lives for less than a millisecond. Whether there was anything.
fn end_adopted(root: &Root, tries: u32, seen: &mut BTreeMap<Identity, Member>) -> bool {
    // The adopter of a cold life is the init of its PID namespace, or a process that stands in for it and is not known.
    let (adopter, own) = match &root.adopter {
        Some(adopter) if adopter.process.is_there() => (adopter.process.pid, Some(&adopter.own_children)),
        _ => (1, None),
    };
    let mut caught = false;
    let mut looks = tries;
    while looks > 0 {
        looks -= 1;
        let children = procfs::children(adopter).unwrap_or_default();
        let adopted = children
            .into_iter()
            .filter(|pid| own.is_none_or(|own| !own.contains(pid)));
        for pid in adopted.filter(|pid| carries_marker(root, *pid)) {
            let Some(stat) = Stat::read(pid).filter(|stat| !stat.is_zombie()) else {
                continue;
            };
            let process = Identity::seen(&stat);
            let member = Member::new(pid);
            signal(process, libc::SIGKILL).ok();
            seen.entry(process).or_insert(member);
            if !caught {
                (caught, looks) = (true, MANY_ADOPTED_LOOKS);
            }
        }
    }
    caught
}

fn carries_marker(root: &Root, pid: i32) -> bool {
    matches!(marker::belonging(pid), Belonging::Marked { marker, detached: false } if marker == root.marker)
}

#[expect(clippy::disallowed_methods, reason = "never called on the thread that supervises")]
fn wait(pause: Duration) {
    std::thread::sleep(pause);
}

/// What is told in the end: `staying` was there at the last look.
fn told(seen: &BTreeMap<Identity, Member>, staying: &[Stat]) -> Leftovers {
    let stays = |process: &Identity| staying.iter().find(|stat| Identity::seen(stat) == *process);
    let mut leftovers = Leftovers::default();
    for (process, member) in seen {
        if let Some(stat) = stays(process) {
            leftovers.remaining.push(Remaining {
                process: member.leftover(),
                why: why_it_stays(stat, member.refused.as_ref()),
            });
        } else if !member.left_to_itself {
            leftovers.ended.push(member.leftover());
        }
    }
    leftovers
}

fn why_it_stays(stat: &Stat, refused: Option<&io::Error>) -> String {
    match (refused, stat.state) {
        (Some(error), _) => format!("it may not be signalled: {error}"),
        (None, 'D') => "it is in an uninterruptible system call".to_owned(),
        (None, state) => format!("it was sent SIGKILL and is still there (state {state})"),
    }
}

/// The living members of a tree, its root not among them.
fn find(root: &Root) -> Vec<Stat> {
    let me = i32::try_from(std::process::id()).unwrap_or(0);
    let processes: HashMap<i32, Stat> = procfs::all().map(|stat| (stat.pid, stat)).collect();
    let mut verdicts: HashMap<i32, bool> = HashMap::from([(root.pid, false), (me, false), (1, false)]);
    // Looked at after the list was read: what the list calls its children are its children.
    let adopter = root.adopter.as_ref().filter(|adopter| adopter.process.is_there());
    if let Some(adopter) = adopter {
        verdicts.insert(adopter.process.pid, false);
        verdicts.extend(adopter.own_children.iter().map(|pid| (*pid, false)));
    }
    let mut found: Vec<Stat> = processes
        .values()
        .filter(|stat| !stat.is_zombie() && belongs(stat, root, adopter, &processes, &mut verdicts, 0))
        .cloned()
        .collect();
    found.sort_by_key(|stat| (stat.start, stat.pid));
    found
}

fn belongs(
    stat: &Stat,
    root: &Root,
    adopter: Option<&Adopter>,
    processes: &HashMap<i32, Stat>,
    verdicts: &mut HashMap<i32, bool>,
    depth: u32,
) -> bool {
    // Parents that change while the list is read could make a circle of it.
    const DEEPEST: u32 = 10_000;
    if let Some(known) = verdicts.get(&stat.pid) {
        return *known;
    }
    let parent_belongs = |verdicts: &mut HashMap<i32, bool>| {
        // A child of the life itself, while that lives.
        stat.parent == root.pid && root.holds_pid
            || depth < DEEPEST
                && processes
                    .get(&stat.parent)
                    .is_some_and(|parent| belongs(parent, root, adopter, processes, verdicts, depth + 1))
    };
    let verdict = if root.holds_pid && stat.process_group == root.pid {
        true
    } else {
        let of_session = root.holds_pid && stat.session == root.pid;
        match marker::belonging(stat.pid) {
            Belonging::Marked { detached: true, .. } | Belonging::Unmarked { detached: true } => false,
            Belonging::Marked { marker, .. } if marker == root.marker => true,
            Belonging::Marked { .. } | Belonging::Hidden => of_session || parent_belongs(verdicts),
            Belonging::Unmarked { .. } => of_session || is_last_orphan(stat, adopter) || parent_belongs(verdicts),
        }
    };
    verdicts.insert(stat.pid, verdict);
    verdict
}

/// An orphan that could be any life's, with no other life left that could claim it.
fn is_last_orphan(stat: &Stat, adopter: Option<&Adopter>) -> bool {
    adopter.is_some_and(|adopter| adopter.last_life && stat.parent == adopter.process.pid)
}

/// A process whose marker names a host that is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stray {
    pub process: Leftover,
    pub host_pid: i32,
    /// `None`: it served the host itself.
    pub kernel: Option<u32>,
    pub rss_bytes: u64,
    /// Why it could not be ended, when that was asked for.
    pub refused: Option<String>,
}

/// What hosts that are gone have left behind. With `kill` it is ended, and the answer says what was and what could not be.
/// What belongs to a living host, to a host of another PID namespace, or has opted out is left alone and not told.
pub fn strays(kill: bool) -> Vec<Stray> {
    let of_a_dead_host = |stat: &Stat| match marker::belonging(stat.pid) {
        Belonging::Marked {
            marker,
            detached: false,
        } => marker::Marker::parse(&marker).filter(|marker| marker.host_is_alive() == Some(false)),
        _ => None,
    };
    let mut strays: Vec<Stray> = Vec::new();
    for stat in procfs::all().filter(|stat| !stat.is_zombie()) {
        let Some(marker) = of_a_dead_host(&stat) else { continue };
        let process = Leftover {
            pid: stat.pid,
            command: procfs::command(stat.pid),
        };
        let rss_bytes = usage::rss(stat.pid).unwrap_or(0);
        let refused = kill
            .then(|| signal(Identity::seen(&stat), libc::SIGKILL).err())
            .flatten()
            .map(|error| error.to_string());
        strays.push(Stray {
            process,
            host_pid: marker.host_pid,
            kernel: marker.kernel,
            rss_bytes,
            refused,
        });
    }
    strays
}
