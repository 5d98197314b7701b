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
        let text = format!("invalid PROPERTY `{name}`: expected one of {}", PROPERTIES.join(", "));
        return Err(Failure::new(Code::Usage, text));
    }
    let pool = ReadOnlyAccess::find(&args.at.pool)?;
    let views = pool.volumes(Some(&args.at.name))?;
    if views.iter().any(|view| view.snapshot) {
        let text =
            format!("invalid NAME `{}`: expected a volume; this is a snapshot", args.at.name);
        return Err(Failure::new(Code::Usage, text));
    }
    let all = views.into_iter().flat_map(|view| view.properties);
    let is_asked =
        |it: &PropertyView| args.properties.is_empty() || args.properties.contains(&it.name);
    let shown: Vec<PropertyView> = all.filter(is_asked).collect();
    if args.at.pool.talk.json {
        return print_json(&shown, out);
    }
    let row = |it: &PropertyView| {
        let (name, value) = (args.at.name.clone(), value(it, args.script.parsable));
        vec![name, it.name.clone(), value, it.source.name().to_owned()]
    };
    let headings = vec!["NAME", "PROPERTY", "VALUE", "SOURCE"];
    let texts = &["PROPERTY", "VALUE", "SOURCE"];
    let table = Columns { headings, texts, rows: shown.iter().map(row).collect() };
    if args.script.scripted {
        return Ok(table.print_bare(out)?);
    }
    Ok(table.print(&[], terminal_width(), out)?)
}

/// The value of a property: that of a size exactly if a script asks for it.
fn value(view: &PropertyView, exactly: bool) -> String {
    let is_size = matches!(view.name.as_str(), "bandwidth" | "reservation");
    let bytes = blockyard_yard::size::parse(&view.value).ok().filter(|_| is_size && exactly);
    bytes.map_or_else(|| view.value.clone(), |bytes| bytes.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use blockyard_yard::volume_properties::PropertySource;

    #[test]
    fn sizes_are_exact_for_scripts() {
        for (name, text, exact) in [
            ("bandwidth", "200M", "209715200"),
            ("reservation", "0", "0"),
            ("sync", "always", "always"),
        ] {
            let (name, text, source) = (name.to_owned(), text.to_owned(), PropertySource::Pool);
            let view = PropertyView { name, value: text.clone(), source };
            assert_eq!((value(&view, false), value(&view, true).as_str()), (text, exact));
        }
    }
}
