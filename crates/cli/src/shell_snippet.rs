//! What `serve` prints: for each device what it is, and one line to paste that uses it.

use std::net::SocketAddr;
use std::path::Path;

use blockyard_core::Disk;
use blockyard_yard::spec::DeviceSpec;
use blockyard_yard::vhost::VhostPlace;

/// A line for a shell that uses the device. `uri` is its NBD URI, if NBD is served anywhere.
pub(crate) fn line(
    spec: &DeviceSpec,
    disk: &dyn Disk,
    uri: Option<&str>,
    control: Option<&Path>,
) -> Option<String> {
    let name = spec.name();
    if disk.geometry().zones.is_some()
        && let Some(control) = control
    {
        return Some(format!("blockyard zone report {name} -c 8{}", control_option(control)));
    }
    let uri = quote(uri?);
    let read_only = disk.limits().read_only;
    let keeps_data = spec.kind().name != "null" || spec.switch("memory_backed");
    Some(if disk.geometry().zones.is_some() || read_only {
        format!("nbdinfo {uri}")
    } else if keeps_data {
        let write = "-c 'write -P 0x5a 0 1M' -c 'read -P 0x5a 0 1M'";
        format!("qemu-io -f raw {write} {uri}")
    } else {
        format!(
            "fio --name=t --ioengine=nbd --uri={uri} --rw=randread --bs=4k --iodepth=32 \
             --time_based --runtime=5"
        )
    })
}

/// A line for a Linux host that attaches the device over NVMe/TCP. A host cannot connect to the
/// address of a listener on all addresses, and has to know its secret: the line has placeholders.
pub(crate) fn nvme_connect(nqn: &str, address: SocketAddr, needs_secret: bool) -> String {
    let ip = match address.ip() {
        ip if ip.is_unspecified() => "ADDRESS".to_owned(),
        ip => ip.to_string(),
    };
    let secret = if needs_secret { " --dhchap-secret DHHC-1:..." } else { "" };
    format!("nvme connect -t tcp -a {ip} -s {} -n {nqn}{secret}", address.port())
}

/// Options of QEMU that attach the device to a virtual machine, whose memory has to be shared.
pub(crate) fn vhost_device(place: &VhostPlace) -> String {
    let VhostPlace { device, place } = place;
    let path = place.path.display().to_string();
    let chardev = quote(&format!("socket,id={device},path={path},reconnect=1"));
    format!(
        "qemu-system-x86_64 ... \\\n    \
         -object memory-backend-memfd,id=mem,size=1G,share=on,seal=on \\\n    \
         -machine memory-backend=mem -m 1G -chardev {chardev} \\\n    \
         -device vhost-user-blk-pci,chardev={device}"
    )
}

/// `--control PATH`, unless commands find the socket without.
fn control_option(control: &Path) -> String {
    if control == blockyard_yard::paths::control_socket() {
        return String::new();
    }
    format!(" --control {}", quote(&control.display().to_string()))
}

/// The text as one word of a shell.
pub(crate) fn quote(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:+,@%=".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_a_host_has_placeholders_for_what_only_the_host_knows() {
        let line = |address: &str, needs_secret| {
            nvme_connect("nqn.a:b", address.parse().unwrap(), needs_secret)
        };
        let named = "nvme connect -t tcp -a 192.0.2.1 -s 4420 -n nqn.a:b";
        assert_eq!(line("192.0.2.1:4420", false), named);
        assert_eq!(line("192.0.2.1:4420", true), format!("{named} --dhchap-secret DHHC-1:..."));
        for all in ["0.0.0.0:4420", "[::]:4420"] {
            assert_eq!(line(all, false), named.replace("192.0.2.1", "ADDRESS"));
        }
        assert!(line("[2001:db8::1]:4420", false).contains(" -a 2001:db8::1 "));
    }

    #[test]
    fn words_are_quoted_where_they_must_be() {
        assert_eq!(quote("tcp:127.0.0.1:10809"), "tcp:127.0.0.1:10809");
        assert_eq!(quote("nbd+unix:///a?socket=/x"), "'nbd+unix:///a?socket=/x'");
        assert_eq!(quote("it's"), "'it'\\''s'");
        assert_eq!(quote(""), "''");
    }
}
