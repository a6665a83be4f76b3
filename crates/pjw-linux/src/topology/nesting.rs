//! Checks that the objects of a document nest: the PUs of an object are the PUs of its children.
//!
//! hwloc trusts a file, and aborts or reads invalid memory if two statements contradict each other.

use std::collections::BTreeSet;

use pjw_core::cpuset::{CpuSet, Pu};

/// Checks that the topology objects in an XML file of hwloc are nested correctly: each object must have the PUs
/// (logical CPUs) of its children. Contains the objects whose end tags have not been read yet.
#[derive(Default)]
pub(super) struct Nesting {
    /// Whether the document has another version than 2. Then nothing is checked.
    pub(super) is_off: bool,
    open: Vec<Object>,
    gp_indexes: BTreeSet<String>,
}

/// A topology object in an XML file of hwloc, with those of its attributes that are checked.
#[derive(Default)]
pub(super) struct Object {
    pub(super) kind: String,
    pub(super) number: Option<Pu>,
    pub(super) gp_index: Option<String>,
    pub(super) cpus: Option<CpuSet>,
    /// The PUs of the object, including offline PUs. hwloc orders objects by this set.
    pub(super) all_cpus: Option<CpuSet>,
    pub(super) nodes: Option<CpuSet>,
    pub(super) all_nodes: Option<CpuSet>,
    /// The PUs of the children.
    child_pus: CpuSet,
    /// The first PU of the latest child.
    latest_first_pu: Option<Pu>,
}

impl Object {
    /// Whether the object is no part of the CPU hierarchy: memory, devices and annotations.
    fn is_outside_cpu_tree(&self) -> bool {
        matches!(self.kind.as_str(), "NUMANode" | "MemCache" | "Bridge" | "PCIDev" | "OSDev" | "Misc")
    }

    /// Checks that the available PUs and nodes are subsets of the complete sets.
    fn check_sets(&self) -> Result<(), String> {
        let pairs = [("cpuset", &self.cpus, &self.all_cpus), ("nodeset", &self.nodes, &self.all_nodes)];
        for (name, available, complete) in pairs {
            let Some(available) = available else { continue };
            if !complete.as_ref().is_some_and(|complete| available.is_subset(complete)) {
                return Err(format!("the {name} of a {} is not part of its complete_{name}", self.kind));
            }
        }
        Ok(())
    }
}

impl Nesting {
    /// Must be called at the start tag of each topology object. Checks `object` against the object that contains it.
    /// Checks nothing in a document of another version than 2.
    ///
    /// # Errors
    /// A description of the problem, as text for users.
    pub(super) fn open_object(&mut self, object: Object) -> Result<(), String> {
        if self.is_off {
            return Ok(());
        }
        object.check_sets()?;
        if let Some(gp_index) = &object.gp_index
            && !self.gp_indexes.insert(gp_index.clone())
        {
            return Err(format!("two objects have the gp_index {gp_index}"));
        }
        self.check_object(&object)?;
        self.open.push(object);
        Ok(())
    }

    /// Checks that `object` may be in the innermost open object, and that its sets fit into the sets of that object.
    /// Records the PUs of `object` there, so that the next objects are checked against them.
    fn check_object(&mut self, object: &Object) -> Result<(), String> {
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
        if kind == "NUMANode" && object.all_nodes.as_ref().and_then(CpuSet::only_pu) != object.number {
            return Err("the complete_nodeset of a NUMANode is not its number".to_owned());
        }
        if object.is_outside_cpu_tree() {
            return Ok(());
        }
        if outer.is_outside_cpu_tree() {
            return Err(format!("a {kind} is in a {}", outer.kind));
        }
        let Some(cpus) = &object.cpus else { return Err(format!("a {kind} has no cpuset")) };
        if kind == "PU" && object.number != cpus.only_pu() {
            return Err(format!("the cpuset of a PU is {cpus} and not its number"));
        }
        if outer.kind == "PU" || !outer.cpus.as_ref().is_some_and(|outer_cpus| cpus.is_subset(outer_cpus)) {
            return Err(format!("CPUs {cpus} of a {kind} are not all in the {} around it", outer.kind));
        }
        if cpus.intersects(&outer.child_pus) {
            return Err(format!("CPUs {cpus} of a {kind} are in another {kind}, too"));
        }
        let first = object.all_cpus.as_ref().and_then(CpuSet::first);
        if first.is_some() && first <= outer.latest_first_pu {
            return Err(format!("a {kind} stands behind one that begins with a higher CPU"));
        }
        outer.latest_first_pu = first.or(outer.latest_first_pu);
        outer.child_pus = outer.child_pus.union(cpus);
        Ok(())
    }

    /// Must be called at the end tag of each topology object. Checks that each PU (logical CPU) of the object is a PU
    /// of one of its children.
    ///
    /// # Errors
    /// A description of the problem, as text for users.
    pub(super) fn close_object(&mut self) -> Result<(), String> {
        let Some(object) = self.open.pop() else { return Ok(()) };
        if object.is_outside_cpu_tree() || object.kind == "PU" {
            return Ok(());
        }
        match &object.cpus {
            Some(cpus) if *cpus != object.child_pus => {
                let missing = cpus.difference(&object.child_pus);
                Err(format!("nothing in a {} has its CPUs {missing}", object.kind))
            }
            _ => Ok(()),
        }
    }
}
