//! The guides of the manual, run as they are written there.

use std::fs;
use std::path::Path;

use crate::attach::Unmount;
use crate::place::Place;
use crate::run::{bounded, finish, ok};
use crate::yard::{BLOCKYARD, Yard};

/// The commands of a section of a page: the lines of its indented blocks and of its shell blocks,
/// without comments.
fn commands(page: &str, section: &str) -> Vec<String> {
    let path = format!("{}/../../docs/{page}", env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(path).unwrap();
    let start = text.find(&format!("### {section}\n")).expect("the page has the section");
    let text = &text[start + 4..];
    let text = &text[..text.find("\n### ").unwrap_or(text.len())];
    let mut is_shell = false;
    let mut commands = Vec::new();
    for line in text.lines() {
        if line.starts_with("```") {
            is_shell = line == "```sh";
        } else if let Some(command) = line.strip_prefix("    ").or(is_shell.then_some(line)) {
            let command = command.split(" #").next().unwrap_or_default().trim();
            if !matches!(command, "" | "...") {
                commands.push(command.to_owned());
            }
        }
    }
    assert!(!commands.is_empty(), "{page}: {section} has no commands");
    commands
}

/// A session: commands run in a directory of its own, and `serve` runs until the session ends.
struct Session {
    yard: Option<Yard>,
    /// The place until the yard has it.
    place: Option<Place>,
}

impl Session {
    fn new() -> Session {
        Session { yard: None, place: Some(Place::new()) }
    }

    fn path(&self) -> &Path {
        let place = self.yard.as_ref().map(|yard| &yard.place).or(self.place.as_ref());
        place.expect("one of them has it").path()
    }

    /// Runs commands; returns what the last one printed. In a `serve` the words of `files` are
    /// files of the session's directory, where the server does not run.
    fn run(&mut self, commands: &[String], files: &[&str]) -> String {
        let mut printed = String::new();
        for command in commands {
            match command.strip_prefix("blockyard serve") {
                Some(args) => self.serve(args, files),
                None => printed = self.shell(command),
            }
        }
        printed
    }

    fn serve(&mut self, args: &str, files: &[&str]) {
        let place = self.place.take().expect("a guide serves once");
        let words = args.split_whitespace().filter(|word| *word != "&");
        let words = words.map(|word| match files.contains(&word) {
            true => place.file(word),
            false => word.trim_matches('\'').to_owned(),
        });
        let words: Vec<_> = words.collect();
        let line: Vec<_> = ["serve"].into_iter().chain(words.iter().map(String::as_str)).collect();
        self.yard = Some(Yard::start(place, &line));
    }

    fn shell(&self, command: &str) -> String {
        let line = ["sh", "-c", command];
        let folder = Path::new(BLOCKYARD).parent().unwrap();
        let path = std::env::var("PATH").unwrap_or_default();
        let mut bounded = bounded(&line);
        bounded
            .env("PATH", format!("{}:/usr/bin:/usr/sbin:/bin:/sbin:{path}", folder.display()))
            .env("XDG_RUNTIME_DIR", self.path())
            .env("XDG_STATE_HOME", self.path())
            .current_dir(self.path());
        finish(&line, &mut bounded).ok().out
    }

    /// Stops the yard as a user does.
    fn end(mut self) {
        let yard = self.yard.as_mut().expect("the guide serves");
        yard.signal("TERM");
        assert!(yard.end().success());
    }
}

/// The bug: the guide failed at the mount, as the yard was not started with a directory in which a
/// request may mount.
#[test]
fn guide_of_zonefs() {
    let mut session = Session::new();
    let place = session.path().to_owned();
    fs::write(place.join("disk.img"), vec![7; 4 << 20]).unwrap();
    let _unmount = Unmount(place.join("z").display().to_string());
    let mut commands_of_use = commands("zonefs.md", "Make, mount, use");
    let unmount = commands_of_use.pop().unwrap();
    assert!(unmount.contains("unmount"), "{unmount}");
    session.run(&commands_of_use[..commands_of_use.len() - 1], &["z"]);
    assert_eq!(fs::metadata(place.join("z/seq/0")).unwrap().len(), 4 << 20);
    session.run(&commands_of_use[commands_of_use.len() - 1..], &[]);
    assert_eq!(fs::metadata(place.join("z/seq/0")).unwrap().len(), 0);
    session.run(&commands("zonefs.md", "Use fio"), &[]);
    session.run(&[unmount], &[]);
    session.end();
}

#[test]
fn guide_of_smr_disks() {
    let mut session = Session::new();
    let printed = session.run(&commands("smr.md", "Create a disk"), &[]);
    assert!(printed.contains("wptr"), "{printed}");
    session.end();
}

#[test]
fn guide_of_block_files() {
    let mut session = Session::new();
    let place = session.path().display().to_string();
    let (files, data) = (format!("{place}/mnt/yard"), format!("{place}/mnt/data"));
    let _unmount = (Unmount(data.clone()), Unmount(files.clone()));
    let mut device = "/dev/loop0".to_owned();
    for command in commands("fuse.md", "Put a file system on a device") {
        let command = command.replace("/mnt/", &format!("{place}/mnt/"));
        let command = command.replace("/dev/loop0", &device);
        if command.starts_with("losetup --find") {
            // Another test may take the device that losetup found, so it is tried again.
            let file = command.split_whitespace().last().unwrap();
            device = crate::attach::Loop::attach(file).keep();
        } else {
            session.run(&[command], &[]);
        }
    }
    session.end();
}

/// A restore of one file from a backup that a yard made by its configuration.
#[test]
fn guide_of_backups() {
    let place = Place::new();
    let (pool, there) = (place.file("pool"), place.file("there"));
    let (root, image) = (place.path().join("root"), place.file("image"));
    fs::create_dir(&root).unwrap();
    fs::write(root.join("hello"), "the file").unwrap();
    let root = root.display().to_string();
    ok(&["mke2fs", "-q", "-t", "ext4", "-d", &root, &image, "16M"]);
    let volume = format!("volume:///v0?path={pool}&size=16M");
    let yard = Yard::serve(&[&volume]);
    ok(&["qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", &image, &yard.uri("v0")]);
    drop(yard);
    // The yard of the page: the target is in this machine.
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/backup.md");
    let page = fs::read_to_string(page).unwrap();
    let (_, settings) = page.split_once("```toml\n").unwrap();
    let settings = settings.split_once("```").unwrap().0;
    let (before, target) = settings.split_once("\"ssh\"").unwrap();
    let (_, after) = target.split_once("\"blockyard\"").unwrap();
    let settings = format!("{before}{BLOCKYARD:?}{after}")
        .replace("/srv/pool", &pool)
        .replace("/srv/backup", &there)
        .replace("100G", "16M");
    let file = place.file("yard.toml");
    fs::write(&file, settings).unwrap();
    let yard = Yard::serve_in(place, &["-c", &file]);
    let control = yard.control();
    let list = [BLOCKYARD, "backup", "list", "--json", "--control", &control];
    let is_done = || {
        let policies = finish(&list, &mut bounded(&list)).json();
        assert_eq!(policies[0]["error"], serde_json::Value::Null, "{policies}");
        policies[0]["last_success"].is_u64()
    };
    let waits = (0..3000).any(|_| {
        std::thread::park_timeout(std::time::Duration::from_millis(10));
        is_done()
    });
    assert!(waits, "{}", yard.complained());
    let metrics = ok(&["curl", "-s", "--unix-socket", &control, "http://localhost/metrics"]);
    assert!(metrics.contains("blockyard_backup_runs_total{backup=\"offsite\"} 1"), "{metrics}");
    let printed = ok(&[BLOCKYARD, "backup", "list", "--control", &control]);
    assert!(printed.contains("offsite") && printed.contains(" done "), "{printed}");
    restore(&there);
    ok(&[BLOCKYARD, "volume", "check", &there]);
}

/// Runs the commands by which a file of the backup in the pool `there` is restored.
fn restore(there: &str) {
    let mut session = Session::new();
    let place = session.path().display().to_string();
    let _unmount = (Unmount(format!("{place}/mnt/data")), Unmount(format!("{place}/mnt/yard")));
    for directory in ["mnt", "mnt/data", "mnt/yard"] {
        fs::create_dir(format!("{place}/{directory}")).unwrap();
    }
    let snapshots = ["volume", "list", "-t", "snapshot", "-Hp", "-o", "name", there];
    let snapshot = ok(&[&[BLOCKYARD][..], &snapshots].concat()).trim().to_owned();
    assert!(snapshot.starts_with("v0@offsite-2"), "{snapshot}");
    let mut device = "/dev/loop0".to_owned();
    for command in commands("backup.md", "Restore one file") {
        let command = command
            .replace("/mnt/", &format!("{place}/mnt/"))
            .replace("/srv/backup", there)
            .replace("v0@offsite-2026-11-29T20", &snapshot)
            .replace("/dev/loop0", &device);
        if command.starts_with("losetup --find") {
            // Another test may take the device that losetup found, so it is tried again.
            let file = command.split_whitespace().last().unwrap();
            device = crate::attach::Loop::attach(file).keep();
        } else {
            session.run(&[command], &[]);
        }
    }
    assert_eq!(fs::read_to_string(format!("{place}/mnt/restored")).unwrap(), "the file");
    session.end();
}
