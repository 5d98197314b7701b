//! A client of S3 that is not ours, boto3, as the witness of what a store has: one Python program
//! that executes a line at a time.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use crate::capability::Capability;
use crate::s3_server::{KEY_ID, SECRET_KEY};

/// Reads a line of words and answers by a line: `ok WORD...` or `error CODE`. Bytes are in hex.
const PROGRAM: &str = r#"
import sys, boto3, botocore
from botocore.config import Config
endpoint, bucket, key, secret = sys.argv[1:]
s3 = boto3.client("s3", endpoint_url=endpoint, aws_access_key_id=key, aws_secret_access_key=secret,
    region_name="us-east-1", config=Config(retries={"max_attempts": 1}))
def execute(verb, name="", body=""):
    if verb == "bucket":
        s3.create_bucket(Bucket=bucket)
    elif verb == "put":
        s3.put_object(Bucket=bucket, Key=name, Body=bytes.fromhex(body))
    elif verb == "get":
        return [s3.get_object(Bucket=bucket, Key=name)["Body"].read().hex()]
    elif verb == "delete":
        s3.delete_object(Bucket=bucket, Key=name)
    elif verb == "list":
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=name)
        return [it["Key"] for page in pages for it in page.get("Contents", [])]
    return []
for line in sys.stdin:
    try:
        print("ok", *execute(*line.split()), flush=True)
    except botocore.exceptions.ClientError as error:
        print("error", error.response["Error"]["Code"], flush=True)
"#;

/// The witness of one bucket.
#[derive(Debug)]
pub struct S3Witness {
    child: Child,
    lines: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl S3Witness {
    /// Starts it, and makes the bucket. Returns `None` if no Python has boto3 and
    /// `BLOCKYARD_TEST_SKIP` names `object-stores`.
    ///
    /// # Panics
    /// If no Python has boto3, or the store does not make the bucket.
    pub fn start(endpoint: &str, bucket: &str) -> Option<S3Witness> {
        let has_boto3 = |python: &&&str| {
            let mut command = Command::new(python);
            command.args(["-c", "import boto3"]).stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        };
        // A Python of a version manager may lack what Debian's has, and the other way round.
        let Some(python) = ["/usr/bin/python3", "python3"].iter().find(has_boto3) else {
            Capability::ObjectStores.is_missing("no Python has boto3: `make deps` installs it");
            return None;
        };
        let mut child = Command::new(python)
            .args(["-c", PROGRAM, endpoint, bucket, KEY_ID, SECRET_KEY])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("Python can be executed");
        let lines = child.stdin.take().expect("it has an input");
        let answers = BufReader::new(child.stdout.take().expect("it has an output"));
        let mut witness = S3Witness { child, lines, answers };
        witness.ask("bucket").expect("the store makes a bucket");
        Some(witness)
    }

    /// The names that begin with `prefix`, in order.
    ///
    /// # Panics
    /// If the store refuses.
    pub fn list(&mut self, prefix: &str) -> Vec<String> {
        self.ask(&format!("list {prefix}")).expect("the store lists")
    }

    /// The bytes of an object; `None` if it is not there.
    ///
    /// # Panics
    /// If the store refuses.
    pub fn get(&mut self, name: &str) -> Option<Vec<u8>> {
        match self.ask(&format!("get {name}")) {
            Ok(words) => Some(words.first().map_or(Vec::new(), |hex| bytes(hex))),
            Err(code) if code == "NoSuchKey" => None,
            Err(code) => panic!("cannot read `{name}`: {code}"),
        }
    }

    /// Writes an object, whatever is there.
    ///
    /// # Panics
    /// If the store refuses.
    pub fn put(&mut self, name: &str, body: &[u8]) {
        let hex = body.iter().fold(String::new(), |mut hex, byte| {
            _ = write!(hex, "{byte:02x}");
            hex
        });
        self.ask(&format!("put {name} {hex}")).expect("the store writes");
    }

    /// Deletes an object.
    ///
    /// # Panics
    /// If the store refuses.
    pub fn delete(&mut self, name: &str) {
        self.ask(&format!("delete {name}")).expect("the store deletes");
    }

    /// Executes a line; the words of the answer, or the code of an error.
    fn ask(&mut self, line: &str) -> Result<Vec<String>, String> {
        writeln!(self.lines, "{line}").expect("the witness lives");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("the witness answers");
        let mut words = answer.split_whitespace().map(str::to_owned);
        match words.next().as_deref() {
            Some("ok") => Ok(words.collect()),
            Some("error") => Err(words.next().unwrap_or_default()),
            _ => panic!("the witness has ended at `{}`", &line[..line.len().min(100)]),
        }
    }
}

impl Drop for S3Witness {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

fn bytes(hex: &str) -> Vec<u8> {
    let digit = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("it is hex");
    (0..hex.len()).step_by(2).map(digit).collect()
}
