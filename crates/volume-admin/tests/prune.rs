//! Pruning a pool: holds, clones, snapshots in use, prefixes, and what invalid arguments destroy.
#![allow(clippy::unwrap_used)] // Test code.

use std::path::Path;
use std::sync::Arc;

use blockyard_testing::temp_dir::TempDir;
use blockyard_volume::admin::now;
use blockyard_volume::{Options, Running};
use blockyard_volume_admin::prune::{PrunePlan, plan};
use blockyard_volume_admin::send::{SendOptions, Sending};

fn pool(place: &TempDir) -> Arc<Running> {
    Running::open(&place.path().join("pool"), Options::default()).unwrap()
}

fn planned(running: &Running, volume: Option<&str>, prefix: &str) -> PrunePlan {
    plan(running, volume, prefix, &"1h".parse().unwrap(), now() + 1).unwrap()
}

fn doomed(plan: &PrunePlan) -> Vec<&str> {
    plan.doomed.iter().map(|meta| meta.name.as_str()).collect()
}

#[test]
fn held_cloned_and_used_snapshots_stay() {
    let place = TempDir::new(Path::new(env!("CARGO_TARGET_TMPDIR")), "prune");
    let running = pool(&place);
    for volume in ["v0", "v1"] {
        running.create(volume, 1 << 20, 4096).unwrap();
        for snapshot in ["a", "b", "auto-1", "c", "auto-2", "d"] {
            running.snapshot(&format!("{volume}@{snapshot}")).unwrap();
        }
    }
    running.hold_snapshot("v0@a", "keep").unwrap();
    running.clone_of("v0@b", "clone").unwrap();
    let options = SendOptions { snapshot: "v0@c", ..SendOptions::default() };
    let sending = Sending::begin(&running, &options).unwrap();
    let all = planned(&running, None, "");
    let wanted = ["v0@auto-1", "v0@auto-2", "v1@a", "v1@b", "v1@auto-1", "v1@c", "v1@auto-2"];
    assert_eq!(doomed(&all), wanted);
    let kept: Vec<_> = all.kept.iter().map(|(name, why)| (name.as_str(), why.as_str())).collect();
    let wanted = [
        ("v0@a", "held by `keep`"),
        ("v0@b", "origin of the clone `clone`"),
        ("v0@c", "in use"),
        ("v0@d", "newest of its hour"),
        ("v1@d", "newest of its hour"),
    ];
    assert_eq!(kept, wanted);
    assert_eq!(doomed(&planned(&running, Some("v0"), "")), ["v0@auto-1", "v0@auto-2"]);
    assert_eq!(doomed(&planned(&running, Some("v1"), "auto-")), ["v1@auto-1"]);
    assert_eq!(doomed(&planned(&running, Some("v1"), "none")), [""; 0]);
    for (volume, prefix, wanted) in [
        (Some("none"), "", "there is no volume `none` in this pool"),
        (Some("v0@a"), "", "invalid name `v0@a`"),
        (None, "a@b", "invalid prefix `a@b`"),
        (None, "-", "invalid prefix `-`"),
    ] {
        let error = plan(&running, volume, prefix, &"1h".parse().unwrap(), now()).unwrap_err();
        assert!(error.to_string().contains(wanted), "{error}");
    }
    running.destroy_all(&all.doomed).unwrap();
    drop(sending);
    let names: Vec<_> = running.pool().list().into_iter().map(|meta| meta.name).collect();
    assert_eq!(names, ["v0", "v0@a", "v0@b", "v0@c", "v0@d", "v1", "v1@d", "clone"]);
    assert_eq!(doomed(&planned(&running, None, "")), ["v0@c"]);
}
