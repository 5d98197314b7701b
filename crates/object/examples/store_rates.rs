//! Rates of MinIO and versitygw by the client of pools, to compare a pool with: PUTs and GETs of
//! 4 KiB and 4 MiB, one and several at once. `make object-stores` builds the stores.
//!
//! `cargo run --release -p blockyard-object --example store_rates [SECONDS]`
#![allow(clippy::unwrap_used)] // A measurement: any error ends it.

use std::time::{Duration, Instant};

use blockyard_object::{Access, ObjectClient, ObjectUri, Retries};
use blockyard_testing::s3_server::{KEY_ID, S3Program, SECRET_KEY};
use blockyard_testing::s3_witness::S3Witness;
use blockyard_testing::temp_dir::TempDir;
use bytes::Bytes;
use futures::future::join_all;

/// Objects that each worker writes and reads in turn.
const NAMES: usize = 8;

fn main() {
    let seconds = std::env::args().nth(1).map_or(3.0, |text| text.parse().unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for program in S3Program::ALL {
        let folder = TempDir::new(&std::env::temp_dir(), "store-rates");
        let server = program.start(folder.path()).unwrap();
        let _witness = S3Witness::start(&server.endpoint(), "vol").unwrap();
        let access = Access::to_endpoint(&server.endpoint(), KEY_ID, SECRET_KEY).unwrap();
        let uri = ObjectUri::parse("s3://vol/rates").unwrap();
        let client = ObjectClient::connect(&uri, &access, Retries::default()).unwrap();
        for (len, at_once) in
            [(4 << 10, 1), (4 << 10, 4), (4 << 10, 16), (4 << 20, 1), (4 << 20, 4)]
        {
            for verb in ["PUT", "GET"] {
                let time = Duration::from_secs_f64(seconds);
                let line = runtime.block_on(measure(&client, verb, len, at_once, time));
                println!("{}: {line}", program.name());
            }
        }
    }
}

async fn measure(
    client: &ObjectClient,
    verb: &str,
    len: usize,
    at_once: usize,
    time: Duration,
) -> String {
    let body = &Bytes::from(vec![7; len]);
    let start = Instant::now();
    let workers = (0..at_once).map(|worker| async move {
        let mut latencies = Vec::new();
        while start.elapsed() < time {
            let name = format!("{len}/{worker}/{}", latencies.len() % NAMES);
            let begin = Instant::now();
            match verb {
                "PUT" => client.put(&name, body).await.unwrap(),
                _ => _ = client.get(&name, None).await.unwrap().unwrap(),
            }
            latencies.push(begin.elapsed());
        }
        latencies
    });
    let mut all = join_all(workers).await.concat();
    let rate = all.len() as f64 / start.elapsed().as_secs_f64();
    all.sort();
    let (p50, p99) = (all[all.len() / 2], all[all.len() * 99 / 100]);
    let megabytes = rate * len as f64 / 1e6;
    let kib = len >> 10;
    let speed = format!("{rate:.0}/s, {megabytes:.1} MB/s");
    format!("{verb} {kib} KiB x{at_once}: {speed}, p50 {p50:.2?}, p99 {p99:.2?}")
}
