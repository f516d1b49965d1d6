//! Source lines as small numbers, so that the shadow memory can hold them.
use std::{collections::HashMap, panic::Location, ptr};

use super::error::AccessKind;

pub type Site = &'static Location<'static>;

/// A source line and what it did there, in 32 bits. Never 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(transparent)]
pub struct Tag(u32);

impl Tag {
    const KINDS: [AccessKind; 9] = [
        AccessKind::Load,
        AccessKind::LoadConstant,
        AccessKind::LoadMatrix,
        AccessKind::Store,
        AccessKind::Atomic,
        AccessKind::AsyncCopy,
        AccessKind::Wgmma,
        AccessKind::Mbarrier,
        AccessKind::BulkCopy,
    ];

    #[inline]
    pub fn kind(self) -> AccessKind {
        Tag::KINDS[(self.0 & 15) as usize]
    }
}

/// The lines met so far. Numbering goes by value: one line may have several `Location`s.
pub struct Sites {
    cache: Box<[(usize, u32); 256]>,
    numbers: HashMap<Site, u32>,
    sites: Vec<Site>,
}

impl Sites {
    pub fn new() -> Self {
        Sites { cache: Box::new([(0, 0); 256]), numbers: HashMap::new(), sites: Vec::new() }
    }

    #[inline]
    pub fn tag(&mut self, kind: AccessKind, site: Site) -> Tag {
        let address = ptr::from_ref(site).addr();
        // `Location` is 24 bytes: the lowest three bits say nothing.
        let slot = (address >> 3 ^ address >> 11) % 256;
        let (cached, mut number) = self.cache[slot];
        if cached != address {
            number = self.number(site);
            self.cache[slot] = (address, number);
        }
        Tag(number << 4 | kind as u32)
    }

    #[cold]
    fn number(&mut self, site: Site) -> u32 {
        *self.numbers.entry(site).or_insert_with(|| {
            self.sites.push(site);
            self.sites.len() as u32
        })
    }

    pub fn site(&self, tag: Tag) -> Site {
        self.sites[(tag.0 >> 4) as usize - 1]
    }
}
