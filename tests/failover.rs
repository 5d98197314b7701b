//! The examples of a failover in `contrib/failover`: the programs that read them accept them.

use std::fs;
use std::path::Path;

use crate::place::Place;
use crate::run::{ok, python};
use crate::yard::BLOCKYARD;

fn file(name: &str) -> String {
    format!("{}/../../{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn the_configuration_is_accepted_and_that_of_the_pods_is_the_same_but_for_comments() {
    let path = file("contrib/failover/blockyard.toml");
    ok(&[BLOCKYARD, "check", &path]);
    let parsed = python(
        "import sys, tomllib, yaml\n\
         documents = list(yaml.safe_load_all(open(sys.argv[1])))\n\
         kinds = {document['kind']: document for document in documents}\n\
         services = [it for it in documents if it['kind'] == 'Service']\n\
         headless = {it['metadata']['name']: 'clusterIP' in it['spec'] for it in services}\n\
         pods = tomllib.loads(kinds['ConfigMap']['data']['blockyard.toml'])\n\
         assert pods == tomllib.load(open(sys.argv[2], 'rb')), pods\n\
         set = kinds['StatefulSet']['spec']\n\
         assert set['selector']['matchLabels'] == set['template']['metadata']['labels']\n\
         labels = set['selector']['matchLabels']\n\
         assert all(it['spec']['selector'] == labels for it in services)\n\
         assert headless == {'blockyard': False, set['serviceName']: True}, headless\n\
         print(sorted(kinds), end='')",
        &[&file("contrib/failover/kubernetes.yaml"), &path],
    );
    assert_eq!(parsed, "['ConfigMap', 'Secret', 'Service', 'StatefulSet']");
}

#[test]
fn systemd_accepts_the_service_with_the_drop_in() {
    let place = Place::new();
    let folder = place.path();
    let unit = fs::read_to_string(file("packages/systemd/blockyard.service")).unwrap();
    // The program is not installed here.
    let unit = unit.replace("/usr/bin/blockyard", BLOCKYARD);
    place.write("blockyard.service", &unit);
    let drop_ins = folder.join("blockyard.service.d");
    fs::create_dir(&drop_ins).unwrap();
    let drop_in = drop_ins.join("failover.conf");
    fs::copy(file("contrib/failover/failover.conf"), &drop_in).unwrap();
    let verify = |unit: &Path| {
        let path = format!("SYSTEMD_UNIT_PATH={}:", folder.display());
        let unit = unit.to_str().unwrap();
        crate::run::run(&["env", &path, "systemd-analyze", "verify", "--man=no", unit])
    };
    let verified = verify(&folder.join("blockyard.service")).ok();
    assert_eq!((verified.out.as_str(), verified.err.as_str()), ("", ""));
    let text = fs::read_to_string(&drop_in).unwrap().replace("Restart=always", "Restart=allways");
    fs::write(&drop_in, text).unwrap();
    let verified = verify(&folder.join("blockyard.service"));
    assert!(verified.err.contains("failover.conf"), "the drop-in is not read: {verified}");
}
