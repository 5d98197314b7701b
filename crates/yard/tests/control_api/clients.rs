//! NVMe hosts and hypervisors in lists, metrics and refusals; listeners; a volume that grows.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;

use blockyard_yard::client::Client;
use blockyard_yard::config::NvmeSettings;
use blockyard_yard::daemon::{Daemon, DaemonOptions};
use blockyard_yard::endpoint::Endpoint;
use blockyard_yard::paths::TempDir;
use blockyard_yard::uri;
use blockyard_yard::vhost::VhostPlace;
use blockyard_yard::view::{ListenRequest, ListenerView};
use blockyard_yard::volumes::VolumeRequest;
use virtio_driver::{VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags};

use crate::{ZONED, refused, serve, serve_with};

/// The admin queue of an NVMe host on a subsystem, and an I/O queue of it.
fn nvme_queues(address: std::net::SocketAddr, nqn: &str) -> [std::net::TcpStream; 2] {
    let mut controller = 0xffffu16;
    [(0u16, 31u16), (1, 127)].map(|(queue, entries)| {
        let mut stream = std::net::TcpStream::connect(address).unwrap();
        let mut request = [0; 128];
        (request[2], request[4]) = (128, 128);
        stream.write_all(&request).unwrap();
        stream.read_exact(&mut request).unwrap();
        let mut capsule = vec![0; 72 + 1024];
        (capsule[0], capsule[2], capsule[3]) = (4, 72, 72);
        capsule[4..8].copy_from_slice(&(72 + 1024u32).to_le_bytes());
        (capsule[8], capsule[9], capsule[12]) = (0x7f, 0x40, 1);
        capsule[40..44].copy_from_slice(&1024u32.to_le_bytes());
        capsule[47] = 1;
        capsule[50..52].copy_from_slice(&queue.to_le_bytes());
        capsule[52..54].copy_from_slice(&entries.to_le_bytes());
        let data = &mut capsule[72..];
        data[16..18].copy_from_slice(&controller.to_le_bytes());
        data[256..256 + nqn.len()].copy_from_slice(nqn.as_bytes());
        data[512..512 + HOST_NQN.len()].copy_from_slice(HOST_NQN.as_bytes());
        let answer = exchange(&mut stream, &capsule);
        controller = u16::from_le_bytes([answer[8], answer[9]]);
        if queue == 0 {
            let mut enable = [0; 72];
            (enable[0], enable[2], enable[4], enable[8], enable[9]) = (4, 72, 72, 0x7f, 0x40);
            enable[52] = 0x14;
            enable[56..60].copy_from_slice(&0x46_0061u32.to_le_bytes());
            exchange(&mut stream, &enable);
        }
        stream
    })
}

/// Sends a command that succeeds without data to the host; returns its completion.
fn exchange(stream: &mut std::net::TcpStream, capsule: &[u8]) -> [u8; 24] {
    stream.write_all(capsule).unwrap();
    let mut answer = [0; 24];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!((answer[0], &answer[22..24]), (5, &[0, 0][..]), "{answer:?}");
    answer
}

/// The refusal did not name the hosts of the subsystem of all devices.
#[test]
fn the_refusal_to_remove_a_device_names_the_hosts_of_all_devices() {
    let all = "nqn.2026-11.io.blockyard:all";
    let nvme = NvmeSettings { subsystem: Some(all.to_owned()), ..NvmeSettings::default() };
    let served = serve_with(&["null:///a?size=1G"], nvme);
    let place = "tcp:127.0.0.1:0".to_owned();
    let started = served.client.listen(&ListenRequest { place, discovery: false }).unwrap();
    let address = started.addresses[0].strip_prefix("tcp:").unwrap().parse().unwrap();
    let [admin, _io] = nvme_queues(address, all);
    let (code, _, message) = refused(served.client.remove("a", false));
    assert_eq!(code, "busy");
    let client = format!("it has 1 client (tcp:{})", admin.local_addr().unwrap());
    assert!(message.contains(&client), "{message}");
}

/// The metrics did not count their commands, and the list of connections did not say what they use.
#[test]
fn hosts_of_all_devices_are_in_devices_connections_and_metrics() {
    let all = "nqn.2026-11.io.blockyard:all";
    let nvme = NvmeSettings { subsystem: Some(all.to_owned()), ..NvmeSettings::default() };
    let served = serve_with(&["null:///a?size=1G", "null:///b?size=1G"], nvme);
    let client = &served.client;
    let place = "tcp:127.0.0.1:0".to_owned();
    let started = client.listen(&ListenRequest { place, discovery: false }).unwrap();
    let address = started.addresses[0].strip_prefix("tcp:").unwrap().parse().unwrap();
    let [admin, mut io] = nvme_queues(address, all);
    // A Flush of `a` succeeds, one beyond the namespaces is counted for no device.
    let mut flush = [0; 72];
    (flush[0], flush[2], flush[4], flush[9], flush[12]) = (4, 72, 72, 0x40, 1);
    exchange(&mut io, &flush);
    flush[12] = 3;
    io.write_all(&flush).unwrap();
    io.read_exact(&mut [0; 24]).unwrap();
    for name in ["a", "b"] {
        let shown = client.device(name).unwrap();
        let [host] = &shown.hosts[..] else { panic!("{shown:?}") };
        assert_eq!((shown.clients, host.queues), (1, 1), "{name}");
        assert_eq!((&*host.nqn, &*host.subsystem), (HOST_NQN, all));
        assert_eq!(host.peer, format!("tcp:{}", admin.local_addr().unwrap()));
        assert_ne!(shown.nqn.as_deref(), Some(all), "its own subsystem is another one");
    }
    let connections = client.connections().unwrap();
    let queues: Vec<_> = connections.iter().map(|it| (it.queue, it.device.as_deref())).collect();
    assert_eq!(queues, [(Some(0), None), (Some(1), None)]);
    let controller = client.device("a").unwrap().hosts[0].controller;
    for it in &connections {
        let of = (it.subsystem.as_deref(), it.host.as_deref(), it.controller);
        assert_eq!(of, (Some(all), Some(HOST_NQN), Some(controller)));
    }
    for stats in client.stats().unwrap() {
        let [host] = &stats.hosts[..] else { panic!("{stats:?}") };
        assert_eq!(
            (&*host.nqn, host.controller, &host.queue_numbers[..]),
            (HOST_NQN, controller, &[1][..])
        );
    }
    let text = client.metrics().unwrap();
    for (name, value) in [
        (r#"nvme_controllers{device="a"}"#, "1"),
        (r#"nvme_controllers{device="b"}"#, "1"),
        (r#"nvme_queues{device="b"}"#, "1"),
        (r#"nvme_commands_total{device="a"}"#, "1"),
        (r#"nvme_commands_total{device="b"}"#, "0"),
        (r#"nvme_errors_total{device="a"}"#, "0"),
    ] {
        assert!(text.contains(&format!("\nblockyard_{name} {value}\n")), "{name}: {text}");
    }
}

/// The driver of a virtio disk.
type Driver = VirtioBlkQueue<'static, ()>;

/// Connects a hypervisor with two rings, and has each of them answer a request that `begin` makes.
/// It is connected as long as the result is there.
fn hypervisor(
    socket: &Path,
    begin: impl Fn(&mut Driver) -> std::io::Result<()>,
) -> Box<VirtioBlkTransport> {
    let features = VirtioFeatureFlags::VERSION_1.bits() | 1 << 9 | 1 << 12 | 1 << 13;
    let transport = VhostUser::new(socket.to_str().unwrap(), features).unwrap();
    let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
    let queues = VirtioBlkQueue::setup_queues(transport.as_mut(), 2, 16).unwrap();
    for (index, mut queue) in queues.into_iter().enumerate() {
        begin(&mut queue).unwrap();
        transport.get_submission_notifier(index).notify().unwrap();
        let done = loop {
            if let Some(done) = queue.completions().next() {
                break done;
            }
            std::thread::yield_now();
        };
        assert_eq!(done.ret, 0);
    }
    transport
}

#[test]
fn hypervisors_are_in_the_metrics_by_device_and_ring() {
    let temp = TempDir::new().unwrap();
    let (control, path) = (temp.path().join("control.sock"), temp.path().join("a.sock"));
    let uris = ["null:///a?size=1G", "null:///b?size=1G"];
    let options = DaemonOptions {
        devices: uris.iter().map(|text| uri::parse(text).unwrap()).collect(),
        vhost: vec![VhostPlace::of("a", &format!("unix:{}", path.display())).unwrap()],
        control: Some(control.clone().into()),
        ..DaemonOptions::default()
    };
    let _daemon = Daemon::start(&options).unwrap();
    let client = Client::new(control);
    for requests in 1..=2 {
        drop(hypervisor(&path, |queue| queue.flush(())));
        let listed = client.vhost().unwrap();
        let rings = &listed[0].rings;
        assert_eq!((listed.len(), rings.len()), (1, 2), "{listed:?}");
        for (index, ring) in rings.iter().enumerate() {
            assert_eq!((ring.ring, ring.requests, ring.errors), (index as u64, requests, 0));
        }
        while client.vhost().unwrap()[0].is_connected {
            std::thread::yield_now();
        }
        let text = client.metrics().unwrap();
        for (name, value) in [
            (r#"vhost_connected{device="a"}"#, 0),
            (r#"vhost_queues{device="a"}"#, 0),
            (r#"vhost_requests_total{device="a",ring="0"}"#, requests),
            (r#"vhost_requests_total{device="a",ring="1"}"#, requests),
            (r#"vhost_errors_total{device="a",ring="1"}"#, 0),
            (r#"vhost_bytes_total{device="a",ring="1",op="read"}"#, 0),
            (r#"vhost_bytes_total{device="a",ring="1",op="write"}"#, 0),
        ] {
            assert!(text.contains(&format!("\nblockyard_{name} {value}\n")), "{name}: {text}");
        }
        for name in [
            r#"vhost_kicks_total{device="a",ring="0"}"#,
            r#"vhost_calls_total{device="a",ring="0"}"#,
            r#"vhost_sleeps_total{device="a",ring="0"}"#,
            r#"vhost_spins_total{device="a",ring="0",found="yes"}"#,
            r#"vhost_spins_total{device="a",ring="0",found="no"}"#,
            r#"vhost_spin_seconds_total{device="a",ring="0"}"#,
        ] {
            assert!(text.contains(&format!("\nblockyard_{name} ")), "{name}: {text}");
        }
        assert!(!text.contains(r#"vhost_requests_total{device="b""#), "{text}");
    }
    let _stream = UnixStream::connect(&path).unwrap();
    while !client.vhost().unwrap()[0].is_connected {
        std::thread::yield_now();
    }
    let text = client.metrics().unwrap();
    assert!(text.contains("\nblockyard_vhost_connected{device=\"a\"} 1\n"), "{text}");
}

/// The series of a family of a client's latency, without the names of the family and of its class.
fn latency_counts(client: &Client) -> Vec<String> {
    let text = client.metrics().unwrap();
    let prefix = "blockyard_client_latency_seconds_count{";
    text.lines().filter_map(|line| line.strip_prefix(prefix)).map(str::to_owned).collect()
}

#[test]
fn the_latency_of_a_queue_of_an_nvme_host_counts_its_commands() {
    let served = serve_with(&["null:///a?size=1G"], NvmeSettings::default());
    let place = "tcp:127.0.0.1:0".to_owned();
    let started = served.client.listen(&ListenRequest { place, discovery: false }).unwrap();
    let address = started.addresses[0].strip_prefix("tcp:").unwrap().parse().unwrap();
    let [_admin, mut io] = nvme_queues(address, "nqn.2026-11.io.blockyard:a");
    for count in 1..=3 {
        // A write of one block, with its data in the capsule.
        let mut capsule = vec![0; 72 + 512];
        (capsule[0], capsule[2], capsule[3]) = (4, 72, 72);
        capsule[4..8].copy_from_slice(&(72 + 512u32).to_le_bytes());
        (capsule[8], capsule[9], capsule[12]) = (0x01, 0x40, 1);
        capsule[40..44].copy_from_slice(&512u32.to_le_bytes());
        capsule[47] = 1;
        exchange(&mut io, &capsule);
        let counts = latency_counts(&served.client);
        let labels =
            format!(r#"peer="tcp:{}",host="{HOST_NQN}",controller="#, io.local_addr().unwrap());
        assert!(counts[0].starts_with(r#"protocol="nvme",server="","#), "{counts:?}");
        assert!(counts[0].contains(&labels), "{counts:?}");
        let rest = format!(r#",queue="1",device="a",op="write"}} {count}"#);
        assert!(counts.len() == 1 && counts[0].ends_with(&rest), "{counts:?}");
        let listed = served.client.connections().unwrap();
        let writes = |queue| {
            let found = listed.iter().find(|it| it.queue == Some(queue)).unwrap();
            found.write_latency.iter().map(|(_, count)| count).sum::<u64>()
        };
        assert_eq!((writes(0), writes(1)), (0, count));
    }
}

/// The latency of a hypervisor had the labels of the one before, if that left between the list of
/// connections and the look at its counters.
#[test]
fn the_latency_of_a_hypervisor_counts_its_requests() {
    let temp = TempDir::new().unwrap();
    let (control, path) = (temp.path().join("control.sock"), temp.path().join("a.sock"));
    let options = DaemonOptions {
        devices: vec![uri::parse("null:///a?size=1G&memory_backed=1&discard=1").unwrap()],
        vhost: vec![VhostPlace::of("a", &format!("unix:{}", path.display())).unwrap()],
        control: Some(control.clone().into()),
        ..DaemonOptions::default()
    };
    let _daemon = Daemon::start(&options).unwrap();
    let client = Client::new(control);
    for connection in 1..=2 {
        let transport = hypervisor(&path, |queue| queue.discard(0, 4096, ()));
        let peer = format!("process {}", std::process::id());
        let expected = format!(
            r#"protocol="vhost",server="",connection="{connection}",peer="{peer}",host="","#
        ) + r#"controller="",queue="",device="a",op="discard"} 2"#;
        assert_eq!(latency_counts(&client), [expected]);
        drop(transport);
        while client.vhost().unwrap()[0].is_connected {
            std::thread::yield_now();
        }
        assert_eq!(latency_counts(&client), [""; 0]);
    }
}

/// The number of the first active namespace, of an NVMe connection for the admin queue.
fn only_namespace(admin: &mut TcpStream) -> u32 {
    let mut identify = [0; 72];
    (identify[0], identify[2], identify[4], identify[8], identify[9]) = (4, 72, 72, 6, 0x40);
    // The structure of 4096 bytes: CNS 02h, the active namespaces after 0.
    identify[40..44].copy_from_slice(&4096_u32.to_le_bytes());
    (identify[47], identify[48]) = (0x5a, 2);
    admin.write_all(&identify).unwrap();
    let mut answer = [0; 24 + 4096];
    admin.read_exact(&mut answer).unwrap();
    assert_eq!(answer[0], 7, "C2HData");
    // Without the flag SUCCESS a completion follows.
    if answer[1] & 8 == 0 {
        admin.read_exact(&mut [0; 24]).unwrap();
    }
    u32::from_le_bytes(std::array::from_fn(|at| answer[24 + at]))
}

const HOST_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555";

/// NBD clients cannot learn a new length, so the volume must have none. NVMe hosts can.
#[test]
fn a_volume_grows_under_an_nvme_host_and_does_not_shrink() {
    let temp = TempDir::new().unwrap();
    let (control, pool) = (temp.path().join("control.sock"), temp.path().join("pool"));
    let uri = format!("volume:///v0?size=64M&path={}", pool.display());
    let host = "127.0.0.1".to_owned();
    let options = DaemonOptions {
        devices: vec![uri::parse(&uri).unwrap()],
        nvme: vec![Endpoint::Tcp { host, port: 0 }],
        control: Some(control.clone().into()),
        ..DaemonOptions::default()
    };
    let daemon = Daemon::start(&options).unwrap();
    let address = daemon.nvme().addresses(false)[0];
    let client = Client::new(control);
    let [mut admin, mut io] = nvme_queues(address, "nqn.2026-11.io.blockyard:v0");
    let shown = client.device("v0").unwrap();
    assert_eq!((shown.clients, shown.hosts.len()), (1, 1));
    assert_eq!((&*shown.hosts[0].nqn, shown.hosts[0].queues), (HOST_NQN, 1));
    // Reads the last block of a volume of this length; `false` if it is beyond the end.
    let block = shown.logical_block_bytes;
    let mut read = [0; 72];
    (read[0], read[2], read[4], read[8], read[9]) = (4, 72, 72, 2, 0x40);
    read[12..16].copy_from_slice(&only_namespace(&mut admin).to_le_bytes());
    read[40..44].copy_from_slice(&block.to_le_bytes());
    read[47] = 0x5a;
    let mut read_last = |mib: u64| {
        read[48..56].copy_from_slice(&((mib << 20) / u64::from(block) - 1).to_le_bytes());
        io.write_all(&read).unwrap();
        let mut answer = [0; 24];
        io.read_exact(&mut answer).unwrap();
        if answer[0] == 5 {
            assert_eq!(answer[22..24], (0x4080u16 << 1).to_le_bytes(), "LBA Out of Range");
            return false;
        }
        // The data, and the completion.
        io.read_exact(&mut vec![0; block as usize + 24]).unwrap();
        true
    };
    let resize = |size: u64, force: bool| {
        let (name, size_bytes) = ("v0".to_owned(), Some(size));
        client.volume("resize", &VolumeRequest { name, size_bytes, force, ..Default::default() })
    };
    assert!(read_last(64) && !read_last(128));
    assert_eq!(resize(128 << 20, false).unwrap().done, "resized v0 to 128M");
    assert!(read_last(128) && !read_last(129));
    assert_eq!(refused(resize(64 << 20, true)).0, "busy");
    // What the pool refuses leaves the volume as it was.
    assert!(resize((200 << 20) + 1000, false).is_err(), "no whole blocks");
    assert!(read_last(128));
    let mut keep_alive = [0; 72];
    (keep_alive[0], keep_alive[2], keep_alive[4], keep_alive[8]) = (4, 72, 72, 0x18);
    exchange(&mut admin, &keep_alive);
}

#[test]
fn nvme_listeners_come_and_go_while_the_yard_serves() {
    let served = serve(&["null:///a?size=1G", ZONED]);
    let client = &served.client;
    let listen = |place: &str, discovery: bool| {
        client.listen(&ListenRequest { place: place.to_owned(), discovery })
    };
    let unserved = |device: &str| {
        let shown = client.device(device).unwrap();
        assert_eq!(shown.nqn, None);
        assert!(shown.notes.iter().all(|note| !note.contains("NVMe")), "{:?}", shown.notes);
    };
    unserved("a");
    unserved("z");
    // No other test uses this address, so that the port stays free while nothing listens at it.
    let any = "tcp:127.0.78.2:0";
    // What is refused leaves nothing.
    for place in ["unix:/x", "stdio", "tcp:x", "nonsense"] {
        let (code, field, message) = refused(listen(place, false));
        assert_eq!((&*code, &*field), ("invalid", "place"));
        assert_eq!(message, format!("invalid place `{place}`: expected tcp:HOST:PORT"));
    }
    let (code, field, message) = refused(listen(any, true));
    assert_eq!((&*code, &*field), ("invalid", "discovery"), "{message}");
    let (code, field, message) = refused(client.unlisten(any, false));
    assert_eq!((&*code, &*field), ("no_such_listener", "place"));
    assert_eq!(message, format!("there is no NVMe listener at `{any}`; there is none"));
    assert_eq!(client.listeners().unwrap(), []);
    // The devices that are there are served, those that NVMe cannot describe say so.
    let started = listen(any, false).unwrap();
    assert_eq!((&*started.place, started.discovery, started.hosts), (any, false, 0));
    assert!(started.warnings[0].starts_with("any NVMe host that reaches"), "{started:?}");
    let [address] = &started.addresses[..] else { panic!("{started:?}") };
    let nqn = "nqn.2026-11.io.blockyard:a";
    assert_eq!(client.device("a").unwrap().nqn.as_deref(), Some(nqn));
    let notes = client.device("z").unwrap().notes;
    assert!(notes[0].starts_with("not served over NVMe: it has 2 conventional zones"), "{notes:?}");
    let (code, field, message) = refused(listen(address, false));
    assert_eq!((&*code, &*field), ("listen_failed", "place"));
    assert!(message.starts_with(&format!("cannot listen at `{address}`: ")), "{message}");
    assert!(listen(any, true).unwrap().warnings.is_empty(), "discovery shows names only");
    let places = |listed: Vec<ListenerView>| {
        listed.iter().map(|it| (it.discovery, it.hosts)).collect::<Vec<_>>()
    };
    assert_eq!(places(client.listeners().unwrap()), [(false, 0), (true, 0)]);
    // A listener that hosts use is stopped by force only, and their connections end.
    let socket = address.strip_prefix("tcp:").unwrap().parse().unwrap();
    let [mut admin, mut io] = nvme_queues(socket, nqn);
    assert_eq!(places(client.listeners().unwrap()), [(false, 1), (true, 0)]);
    assert_eq!(client.connections().unwrap().len(), 2);
    let (code, field, message) = refused(client.unlisten(address, false));
    assert_eq!((&*code, &*field), ("busy", "place"));
    assert!(message.contains("1 host is connected"), "{message}");
    assert_eq!(client.unlisten(address, true).unwrap().hosts, 1);
    for stream in [&mut admin, &mut io] {
        assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the connection ends");
    }
    unserved("a");
    unserved("z");
    assert_eq!(client.device("a").unwrap().clients, 0);
    // A device that is added meanwhile is served at the same port later.
    client.add("null:///b?size=1G").unwrap();
    assert_eq!(&listen(address, false).unwrap().addresses[0], address);
    let [_admin, _io] = nvme_queues(socket, "nqn.2026-11.io.blockyard:b");
    assert_eq!(client.device("b").unwrap().hosts.len(), 1);
}
