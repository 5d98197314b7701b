//! `volume set` and `volume get`: the properties of a volume.

use std::collections::BTreeMap;
use std::io::Write;

use blockyard_yard::volume_properties::{PROPERTIES, PropertyView};
use blockyard_yard::volumes::VolumeRequest;

use super::pool::{Make, PoolAccess, ReadOnlyAccess};
use super::work_in;
use crate::args::{VolumeGetArgs, VolumeSetArgs};
use crate::devices::print_json;
use crate::failure::{Code, Failure};
use crate::human::{Columns, terminal_width};

pub(super) fn set(args: &VolumeSetArgs, out: &mut impl Write) -> Result<(), Failure> {
    let properties = pairs(args)?;
    let request = VolumeRequest { properties, ..VolumeRequest::default() };
    let pool = PoolAccess::find(&args.at.pool, Make::Never)?;
    work_in(pool, &args.at.pool, &args.at.name, "set", request, out)
}

/// The properties and their values.
fn pairs(args: &VolumeSetArgs) -> Result<BTreeMap<String, String>, Failure> {
    let mut properties = BTreeMap::new();
    for pair in &args.properties {
        let wrong = |wanted: &str| {
            Failure::new(Code::Usage, format!("invalid KEY=VALUE `{pair}`: expected {wanted}"))
        };
        let (key, value) = pair.split_once('=').ok_or_else(|| wrong("KEY=VALUE"))?;
        if properties.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err(wrong("each property once"));
        }
    }
    Ok(properties)
}

pub(super) fn get(args: &VolumeGetArgs, out: &mut impl Write) -> Result<(), Failure> {
    let is_unknown = |name: &&String| !PROPERTIES.contains(&name.as_str());
    if let Some(name) = args.properties.iter().find(is_unknown) {
        let text = format!("invalid PROPERTY `{name}`: expected of {}", PROPERTIES.join(", "));
        return Err(Failure::new(Code::Usage, text));
    }
    let pool = ReadOnlyAccess::find(&args.at.pool)?;
    let views = pool.volumes(Some(&args.at.name))?;
    let all = views.into_iter().flat_map(|view| view.properties);
    let is_asked =
        |it: &PropertyView| args.properties.is_empty() || args.properties.contains(&it.name);
    let shown: Vec<PropertyView> = all.filter(is_asked).collect();
    if args.at.pool.talk.json {
        return print_json(&shown, out);
    }
    let row = |it: &PropertyView| {
        let name = args.at.name.clone();
        vec![name, it.name.clone(), it.value.clone(), it.source.name().to_owned()]
    };
    let headings = vec!["NAME", "PROPERTY", "VALUE", "SOURCE"];
    let table = Columns { headings, rows: shown.iter().map(row).collect() };
    if args.scripted {
        return Ok(table.print_bare(out)?);
    }
    Ok(table.print(&[], terminal_width(), out)?)
}
