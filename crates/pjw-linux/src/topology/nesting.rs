//! Whether the objects of a document nest: the PUs of each are those of the objects in it.
//!
//! hwloc believes what a file says and aborts, or walks off, where two statements contradict each other.

use std::collections::BTreeSet;

use pjw_core::cpuset::{CpuSet, Pu};

/// The objects that are open, the innermost last.
#[derive(Default)]
pub(super) struct Nesting {
    /// Whether the file is of another version than 2: then nothing is checked.
    pub(super) is_off: bool,
    open: Vec<Object>,
    identities: BTreeSet<String>,
}

/// An object as far as it matters here.
#[derive(Default)]
pub(super) struct Object {
    pub(super) kind: String,
    pub(super) number: Option<Pu>,
    pub(super) identity: Option<String>,
    pub(super) cpus: Option<CpuSet>,
    /// With the PUs that are off; hwloc keeps objects in the order of these.
    pub(super) all_cpus: Option<CpuSet>,
    pub(super) nodes: Option<CpuSet>,
    pub(super) all_nodes: Option<CpuSet>,
    /// The PUs of the objects in it.
    inside: CpuSet,
    /// The first PU of the object in it that came last.
    latest: Option<Pu>,
}

impl Object {
    /// Memory, devices and remarks hang beside the tree of PUs.
    fn is_beside(&self) -> bool {
        matches!(self.kind.as_str(), "NUMANode" | "MemCache" | "Bridge" | "PCIDev" | "OSDev" | "Misc")
    }

    /// What runs is part of what is there.
    fn check_sets(&self) -> Result<(), String> {
        let pairs = [("cpuset", &self.cpus, &self.all_cpus), ("nodeset", &self.nodes, &self.all_nodes)];
        for (name, some, all) in pairs {
            let Some(some) = some else { continue };
            if !all.as_ref().is_some_and(|all| some.is_subset(all)) {
                return Err(format!("the {name} of a {} is not part of its complete_{name}", self.kind));
            }
        }
        Ok(())
    }
}

impl Nesting {
    /// An object begins.
    pub(super) fn open(&mut self, object: Object) -> Result<(), String> {
        if self.is_off {
            return Ok(());
        }
        object.check_sets()?;
        if let Some(identity) = &object.identity
            && !self.identities.insert(identity.clone())
        {
            return Err(format!("two objects have the gp_index {identity}"));
        }
        self.check(&object)?;
        self.open.push(object);
        Ok(())
    }

    fn check(&mut self, object: &Object) -> Result<(), String> {
        let kind = &object.kind;
        let Some(outer) = self.open.last_mut() else {
            let is_root = kind == "Machine" && object.cpus.as_ref().is_some_and(|cpus| !cpus.is_empty());
            return if is_root {
                Ok(())
            } else {
                Err(format!("it begins with a {kind} and not a Machine with CPUs"))
            };
        };
        if kind == "Machine" {
            return Err("a Machine is in another object".to_owned());
        }
        if kind == "NUMANode" && object.all_nodes.as_ref().and_then(CpuSet::single) != object.number {
            return Err("the complete_nodeset of a NUMANode is not its number".to_owned());
        }
        if object.is_beside() {
            return Ok(());
        }
        if outer.is_beside() {
            return Err(format!("a {kind} is in a {}", outer.kind));
        }
        let Some(cpus) = &object.cpus else { return Err(format!("a {kind} has no cpuset")) };
        if kind == "PU" && object.number != cpus.single() {
            return Err(format!("the cpuset of a PU is {cpus} and not its number"));
        }
        if outer.kind == "PU" || !outer.cpus.as_ref().is_some_and(|around| cpus.is_subset(around)) {
            return Err(format!("CPUs {cpus} of a {kind} are not all in the {} around it", outer.kind));
        }
        if cpus.intersects(&outer.inside) {
            return Err(format!("CPUs {cpus} of a {kind} are in another one beside it as well"));
        }
        let first = object.all_cpus.as_ref().and_then(CpuSet::first);
        if first.is_some() && first <= outer.latest {
            return Err(format!("a {kind} stands behind one that begins with a higher CPU"));
        }
        outer.latest = first.or(outer.latest);
        outer.inside = outer.inside.union(cpus);
        Ok(())
    }

    /// The innermost object ends.
    pub(super) fn close(&mut self) -> Result<(), String> {
        let Some(object) = self.open.pop() else { return Ok(()) };
        match &object.cpus {
            Some(cpus) if !object.is_beside() && object.kind != "PU" && *cpus != object.inside => {
                let missing = cpus.difference(&object.inside);
                Err(format!("nothing in a {} has its CPUs {missing}", object.kind))
            }
            _ => Ok(()),
        }
    }
}
