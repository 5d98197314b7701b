//! TLS with certificates that openssl made, tested by two clients.

use crate::place::Place;
use crate::run::{Run, ok, run};
use crate::yard::Yard;

const MEM0: &str = "null:///mem0?size=1M&memory_backed=1";

/// A certificate authority in `folder`, and the certificates that it signed: of a server for
/// localhost and of a client. nbdkit, qemu and libnbd share these names of files.
pub(crate) fn certificates(place: &Place, folder: &str) -> String {
    let script = "
set -e
mkdir \"$1\"; cd \"$1\"
key='-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes'
openssl req -x509 $key -keyout ca-key.pem -out ca-cert.pem -days 2 -subj /CN=authority \\
    -addext basicConstraints=critical,CA:true -addext keyUsage=critical,keyCertSign
for who in server client; do
    openssl req $key -keyout $who-key.pem -out $who.csr -subj /CN=$who
    printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\\nextendedKeyUsage=%sAuth\\n' $who > $who.ext
    openssl x509 -req -in $who.csr -CA ca-cert.pem -CAkey ca-key.pem -CAcreateserial -days 2 \\
        -extfile $who.ext -out $who-cert.pem
done
";
    let path = place.file(folder);
    ok(&["sh", "-c", script, "sh", &path]);
    path
}

/// A yard with TLS, and the folder of its certificates.
fn serve(mode: &str, more: &[&str]) -> (Yard, String) {
    let place = Place::new();
    let folder = certificates(&place, "tls");
    let mut args = vec![MEM0, "--tls", mode, "--tls-certificates", &folder];
    args.extend(more);
    (Yard::serve_in(place, &args), folder.clone())
}

/// qemu's options for the export through TLS, and those of its credentials.
fn qemu(yard: &Yard, folder: &str) -> [String; 2] {
    let credentials = format!("tls-creds-x509,id=tls0,dir={folder},endpoint=client");
    let image = format!(
        "driver=nbd,server.type=unix,server.path={},export=mem0,tls-creds=tls0,\
         tls-hostname=localhost",
        yard.socket()
    );
    [credentials, image]
}

/// The URI of the export through TLS, for libnbd.
pub(crate) fn uri(yard: &Yard, folder: &str) -> String {
    let socket = yard.socket();
    format!("nbds+unix://localhost/mem0?socket={socket}&tls-certificates={folder}")
}

/// Has qemu connect through TLS and verify the server's certificate.
pub(crate) fn qemu_info(yard: &Yard, folder: &str) -> Run {
    let [credentials, image] = qemu(yard, folder);
    run(&["qemu-img", "info", "--object", &credentials, "--image-opts", &image])
}

#[test]
fn libnbd_talks_through_tls() {
    let (yard, folder) = serve("on", &[]);
    let info = run(&["nbdinfo", "--json", &uri(&yard, &folder)]).ok().json();
    assert_eq!(info["TLS"], true, "{info}");
    let back = yard.place.file("back");
    ok(&["nbdcopy", &uri(&yard, &folder), &back]);
    // A client without TLS is served in clear text.
    yard.serves("mem0");
}

#[test]
fn qemu_talks_through_tls() {
    let (yard, folder) = serve("require", &[]);
    let [credentials, image] = qemu(&yard, &folder);
    let commands = ["-c", "write -P 7 0 64k", "-c", "read -P 7 0 64k"];
    let mut line = vec!["qemu-io", "--object", &credentials];
    line.extend(commands);
    line.extend(["--image-opts", &image]);
    ok(&line);
}

#[test]
fn a_client_without_tls_is_refused_where_tls_is_required() {
    let (yard, folder) = serve("require", &[]);
    run(&["nbdinfo", &yard.uri("mem0")]).fails();
    run(&["qemu-img", "info", &yard.uri("mem0")]).fails().says(&["TLS"]);
    run(&["nbdinfo", &uri(&yard, &folder)]).ok();
}

#[test]
fn a_client_is_known_by_its_certificate() {
    let (yard, folder) = serve("require", &["--tls-verify-peer"]);
    run(&["nbdinfo", &uri(&yard, &folder)]).ok();
    // A client of another authority that trusts this server.
    let other = certificates(&yard.place, "other");
    std::fs::copy(format!("{folder}/ca-cert.pem"), format!("{other}/ca-cert.pem")).unwrap();
    run(&["nbdinfo", &uri(&yard, &other)]).fails();
    run(&["nbdinfo", &uri(&yard, &folder)]).ok();
}

#[test]
fn a_server_of_another_authority_is_refused_by_its_client() {
    let (yard, folder) = serve("on", &[]);
    let other = certificates(&yard.place, "other");
    // libnbd has no host name for a unix socket and then does not verify one; qemu is given one.
    qemu_info(&yard, &other).fails();
    qemu_info(&yard, &folder).ok();
}

#[test]
fn tls_where_there_is_none_is_refused() {
    let yard = Yard::serve(&[MEM0]);
    let folder = certificates(&yard.place, "tls");
    run(&["nbdinfo", &uri(&yard, &folder)]).fails();
    yard.serves("mem0");
}
