//! A sliding window: the keys near a row's own position.

/// Keys that a row sees before its own and after it; `i32::MAX` for all.
#[derive(Clone, Copy)]
pub(crate) struct Window {
    pub left: i32,
    pub right: i32,
}

impl Window {
    /// Whether a row at one of the positions from `first` to `last` might not see a key from `begin` to before `end`.
    #[inline(always)]
    pub fn may_hide(self, [first, last]: [i32; 2], [begin, end]: [u32; 2]) -> bool {
        last - begin as i32 > self.left || end as i32 - 1 - first > self.right
    }

    /// The first key that the row at `position` sees, and one past its last.
    #[inline(always)]
    pub fn keys(self, position: i32) -> [i32; 2] {
        [position.saturating_sub(self.left), position.saturating_add(self.right).saturating_add(1)]
    }

    /// Whether the row at `position` does not see `key`.
    #[inline(always)]
    pub fn hides(self, position: i32, key: u32) -> bool {
        let ahead = key as i32 - position;
        -ahead > self.left || ahead > self.right
    }
}
