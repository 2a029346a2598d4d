//! Calls of a life into the daemon that have no answer yet. Pure.

use std::collections::BTreeMap;

use crate::event::CallNumber;
use crate::wire::{CellId, HostCall};

/// More at once are refused: nobody who waits for answers makes that many.
const MAX_CALLS: usize = 1000;
/// What the arguments of all of them may take in memory.
const MAX_BYTES: usize = 256 * 1024 * 1024;

#[derive(Debug, Default)]
pub struct Calls {
    last: CallNumber,
    pending: BTreeMap<CallNumber, Pending>,
    bytes: usize,
}

#[derive(Debug)]
struct Pending {
    id: u64,
    cell: CellId,
    bytes: usize,
}

impl Calls {
    /// Takes a call in and numbers it, or says why not.
    pub fn made(&mut self, id: u64, call: &HostCall) -> Result<CallNumber, String> {
        let bytes = call.name.len() + call.args.len() + call.places.len() + call.bytes.len();
        if self.pending.len() >= MAX_CALLS {
            return Err(format!(
                "{MAX_CALLS} calls into the daemon have no answer yet, and more are not taken"
            ));
        }
        if self.bytes + bytes > MAX_BYTES {
            let sum = self.bytes + bytes;
            return Err(format!(
                "the arguments of calls into the daemon that have no answer yet would be {sum} bytes, and the limit is {MAX_BYTES}"
            ));
        }
        self.last = self.last.wrapping_add(1);
        self.bytes += bytes;
        self.pending.insert(
            self.last,
            Pending {
                id,
                cell: call.cell,
                bytes,
            },
        );
        Ok(self.last)
    }

    /// Under which id the life waits for the answer to this call, if it still does.
    pub fn returned(&mut self, call: CallNumber) -> Option<u64> {
        let Pending { id, bytes, .. } = self.pending.remove(&call)?;
        self.bytes -= bytes;
        Some(id)
    }

    /// The life has given up the call with this id.
    pub fn given_up(&mut self, id: u64) -> Option<CallNumber> {
        let call = self
            .pending
            .iter()
            .find(|(_, pending)| pending.id == id)
            .map(|(call, _)| *call)?;
        self.returned(call);
        Some(call)
    }

    /// Those that come from this cell. They stay: their answers may still be waited for.
    pub fn of_cell(&self, cell: CellId) -> Vec<CallNumber> {
        self.pending
            .iter()
            .filter(|(_, pending)| pending.cell == cell)
            .map(|(call, _)| *call)
            .collect()
    }

    /// The life is gone: none of them will get an answer.
    pub fn ended(&mut self) -> Vec<CallNumber> {
        self.bytes = 0;
        std::mem::take(&mut self.pending).into_keys().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(cell: CellId, bytes: usize) -> HostCall {
        HostCall {
            cell,
            name: String::new(),
            password: None,
            args: String::new(),
            places: String::new(),
            bytes: vec![0; bytes],
        }
    }

    #[test]
    fn an_answer_reaches_the_life_that_waits_for_it_and_no_later_one() {
        let mut calls = Calls::default();
        let first = calls.made(1, &call(7, 0)).unwrap();
        let second = calls.made(2, &call(8, 0)).unwrap();
        assert_eq!(calls.of_cell(8), [second]);
        assert_eq!(calls.returned(first), Some(1));
        assert_eq!(calls.returned(first), None);
        assert_eq!(calls.given_up(2), Some(second));
        assert_eq!(calls.given_up(2), None);
        let third = calls.made(3, &call(9, 0)).unwrap();
        assert_eq!(calls.ended(), [third]);
        // The next life counts from 1 again; the numbers of calls go on.
        let of_next_life = calls.made(3, &call(10, 0)).unwrap();
        assert_eq!(calls.returned(third), None);
        assert_eq!(calls.returned(of_next_life), Some(3));
    }

    #[test]
    fn neither_many_calls_nor_large_ones_fill_the_daemon() {
        let mut calls = Calls::default();
        for id in 0..MAX_CALLS as u64 {
            calls.made(id, &call(1, 1)).unwrap();
        }
        assert!(calls.made(5000, &call(1, 0)).unwrap_err().contains("1000"));
        calls.ended();
        let large = call(1, MAX_BYTES - 1);
        let first = calls.made(1, &large).unwrap();
        assert!(calls.made(2, &call(1, 2)).unwrap_err().contains("bytes"));
        calls.returned(first);
        calls.made(2, &call(1, 2)).unwrap();
    }
}
