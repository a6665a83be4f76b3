//! What the warden decides, told as stories on a machine made by hand: no kernel, no clock.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, unreachable_pub)] // a test may fail

mod asking;
mod auditing;
mod commands;
mod confining;
mod explaining;
mod forgetting;
mod healing;
mod hotplug;
mod machine;
mod membership;
mod newborn;
mod sleeping;
mod undoing;
mod unplugging;
mod unwalled;
