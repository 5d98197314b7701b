//! The session in docs/zfs.md, run as it is written there.

use std::fs;

use crate::place::Place;
use crate::readme::{are_like, steps};
use crate::run::{bounded, finish};
use crate::yard::{BLOCKYARD, Yard};

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/zfs.md");

/// The pool and the socket in the page. The test has them in a directory of its own instead.
const POOL: &str = "/srv/pool";
const SOCKET: &str = "/run/blockyard/nbd.sock";

#[test]
fn the_session_of_a_zfs_administrator_prints_what_the_page_says() {
    let page = fs::read_to_string(PAGE).unwrap();
    let steps = steps(&page);
    assert!(steps.len() >= 20, "{} commands", steps.len());
    let place = Place::new();
    let pool = place.file("pool");
    let serve = page.lines().find(|line| line.starts_with("blockyard serve ")).unwrap();
    let uris = serve.split('\'').filter(|word| word.contains(":///"));
    let uris: Vec<String> = uris.map(|uri| uri.replace(POOL, &pool)).collect();
    let serve: Vec<&str> = ["serve"].into_iter().chain(uris.iter().map(String::as_str)).collect();
    // The default socket, in the runtime directory that `Yard::start` sets for the server.
    let socket = place.file("blockyard/nbd.sock");
    let yard = Yard::start(place, &serve);
    let folder = std::path::Path::new(BLOCKYARD).parent().unwrap();
    for step in steps {
        let script = step.command.replace(POOL, &pool).replace(SOCKET, &socket);
        let line = ["sh", "-c", &script];
        let mut command = bounded(&line);
        let path = std::env::var("PATH").unwrap_or_default();
        command
            .env("PATH", format!("{}:/usr/bin:/bin:{path}", folder.display()))
            .env("XDG_RUNTIME_DIR", yard.place.path())
            .current_dir(yard.place.path());
        let run = finish(&line, &mut command);
        let said = step.printed.iter().map(|line| line.replace(POOL, &pool)).collect::<Vec<_>>();
        let printed: Vec<&str> = run.out.lines().chain(run.err.lines()).collect();
        assert!(are_like(&printed, &said), "the page says {said:#?}, but {run}");
    }
}
