//! The preflight: whether a store excludes a second writer.
//!
//! A pool on a store is safe because two requests do what they say, also if clients race: a PUT
//! with `If-None-Match: *` creates or fails, and a PUT with `If-Match` replaces the version that it
//! names or fails. Some stores ignore these headers and answer 200. Others check first and write
//! afterwards, so that two clients can both succeed. [`preflight`] does what a pool does, with many
//! clients at once, and names what a store did wrong.
//!
//! It cannot find out whether the store syncs an object before it answers.

use std::time::Instant;

use blockyard_os::fresh_id;
use bytes::Bytes;
use futures::future::{FutureExt as _, LocalBoxFuture, join_all, try_join_all};
use serde::Serialize;

use crate::ObjectError;
use crate::client::{Created, Object, ObjectClient, Retries, Swapped};
use crate::location::{Access, ObjectUri};
use crate::requests::Requests;

/// Keys that clients race to create: a store that checks first and writes afterwards may let one
/// client win by chance.
const RACES: usize = 4;
/// Clients that race to create one key.
const RACERS: usize = 32;
/// Tasks that increment one counter.
const COUNTERS: usize = 16;
/// Increments of each task.
const INCREMENTS: usize = 25;
/// Swaps after which a counter that does not reach its end has failed.
const SWAPS_MAX: usize = 50 * COUNTERS * INCREMENTS;
/// Objects that are listed.
const LISTED: usize = 20;

/// Where the objects of the checks are.
pub(crate) const FOLDER: &str = "preflight/";

/// What one check found out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The property.
    pub name: &'static str,
    /// What the store did instead; `None` if it has the property.
    pub failure: Option<String>,
    /// How long the check took, in milliseconds.
    pub took_ms: u64,
}

/// What a preflight found out.
#[derive(Clone, Debug, Serialize)]
pub struct PreflightReport {
    /// The store.
    pub store: String,
    /// All checks, in the order in which they ran.
    pub checks: Vec<Check>,
    /// The requests that were sent.
    pub requests: Requests,
}

impl PreflightReport {
    /// The first thing that the store did wrong.
    pub fn failure(&self) -> Option<&str> {
        self.checks.iter().find_map(|check| check.failure.as_deref())
    }
}

/// Why a check did not pass.
enum Failure {
    /// The store does not have the property.
    Wrong(String),
    /// The store could not be asked.
    Error(ObjectError),
}

impl From<ObjectError> for Failure {
    fn from(error: ObjectError) -> Failure {
        Failure::Error(error)
    }
}

fn wrong<T>(what: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::Wrong(what.into()))
}

/// Checks the store of a client. The objects of the checks are below `preflight/` and are removed.
///
/// # Errors
/// If the store cannot be used at all, for example if it refuses the credentials; if it does not
/// answer in time; or if objects of the checks may be left.
pub async fn preflight(client: &ObjectClient) -> Result<PreflightReport, ObjectError> {
    let id = fresh_id().map_err(|error| ObjectError::Refused {
        doing: "check the store".to_owned(),
        why: error.to_string(),
    })?;
    let folder = format!("{FOLDER}{:032x}", u128::from_le_bytes(id));
    let before = client.requests();
    let checks = checks(client, &folder).await;
    let cleaned = clean(client, &folder).await;
    let checks = checks?;
    cleaned?;
    let requests = client.requests().since(&before);
    Ok(PreflightReport { store: client.title().to_owned(), checks, requests })
}

/// As [`preflight`], for a program without a runtime.
///
/// # Errors
/// As [`preflight`].
pub fn preflight_of(uri: &ObjectUri, access: &Access) -> Result<PreflightReport, ObjectError> {
    let client = ObjectClient::connect(uri, access, Retries::default())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| ObjectError::Refused {
        doing: "start the client of the store".to_owned(),
        why: error.to_string(),
    })?;
    runtime.block_on(preflight(&client))
}

/// Removes what is below the folder.
async fn clean(client: &ObjectClient, folder: &str) -> Result<(), ObjectError> {
    let names: Vec<String> = client.list(folder).await?.into_iter().map(|it| it.name).collect();
    client.delete(&names).await
}

async fn checks(client: &ObjectClient, folder: &str) -> Result<Vec<Check>, ObjectError> {
    // A store that refuses plain requests is not usable, and the error says why. If it answers
    // these, an error of a check says what the store does not do.
    let name = format!("{folder}/plain");
    client.put(&name, &body("plain")).await?;
    client.get(&name, None).await?;
    let properties: [(_, LocalBoxFuture<'_, Result<(), Failure>>); 6] = [
        ("read after write", read_after_write(client, folder).boxed_local()),
        ("list after write", list_after_write(client, folder).boxed_local()),
        ("create only", create_only(client, folder).boxed_local()),
        ("compare and swap", compare_and_swap(client, folder).boxed_local()),
        ("race to create", race_to_create(client, folder).boxed_local()),
        ("race to swap", race_to_swap(client, folder).boxed_local()),
    ];
    let mut checks: Vec<Check> = Vec::new();
    for (name, property) in properties {
        let started = Instant::now();
        let failure = match property.await {
            Ok(()) => None,
            Err(Failure::Wrong(what)) => Some(what),
            // A store that was not reachable has not failed the check. After another failure, the
            // cause may be what the store does wrong.
            Err(Failure::Error(error))
                if error.is_transient() && checks.iter().all(|it| it.failure.is_none()) =>
            {
                return Err(error);
            }
            Err(Failure::Error(error)) => Some(error.to_string()),
        };
        let took_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        checks.push(Check { name, failure, took_ms });
    }
    Ok(checks)
}

fn body(text: impl Into<String>) -> Bytes {
    Bytes::from(text.into())
}

async fn read_after_write(client: &ObjectClient, folder: &str) -> Result<(), Failure> {
    let name = format!("{folder}/read");
    for text in ["first", "second"] {
        client.put(&name, &body(text)).await?;
        match client.get(&name, None).await? {
            Some(object) if object.bytes == text => {}
            Some(_) => return wrong("a read after a PUT returned what was there before the PUT"),
            None => return wrong("a read after a PUT did not find the object"),
        }
    }
    match client.get(&name, Some(1..4)).await? {
        Some(object) if object.bytes == "eco" => {}
        _ => return wrong("a read of a range did not return the bytes of that range"),
    }
    client.delete(&[&name]).await?;
    match client.get(&name, None).await? {
        Some(_) => wrong("a read after a DELETE found the object"),
        None => Ok(()),
    }
}

async fn list_after_write(client: &ObjectClient, folder: &str) -> Result<(), Failure> {
    let folder = format!("{folder}/list");
    let mut names: Vec<String> = (0..LISTED).map(|at| format!("{folder}/{at:04}")).collect();
    let text = body("listed");
    try_join_all(names.iter().map(|name| client.put(name, &text))).await?;
    let listed = async || -> Result<Vec<String>, ObjectError> {
        Ok(client.list(&folder).await?.into_iter().map(|it| it.name).collect())
    };
    let found = listed().await?;
    let missing = names.iter().filter(|name| !found.contains(name)).count();
    if missing > 0 {
        return wrong(format!("a listing lacks {missing} of {LISTED} objects that were written"));
    }
    let kept = names.split_off(LISTED / 2);
    client.delete(&names).await?;
    let mut found = listed().await?;
    found.sort();
    match found == kept {
        true => Ok(()),
        false => wrong("a listing after a DELETE does not have exactly the objects that are left"),
    }
}

async fn create_only(client: &ObjectClient, folder: &str) -> Result<(), Failure> {
    let name = format!("{folder}/create");
    if let Created::Taken(_) = client.create(&name, &body("first")).await? {
        return wrong("a create-only PUT of a key that is not there was refused");
    }
    refuses_to_create(client, &name, "first").await?;
    // A store could know only of keys that were created by such a PUT.
    let name = format!("{folder}/create-after-put");
    client.put(&name, &body("first")).await?;
    refuses_to_create(client, &name, "first").await
}

async fn refuses_to_create(
    client: &ObjectClient,
    name: &str,
    present: &str,
) -> Result<(), Failure> {
    match client.create(name, &body("second")).await? {
        Created::New { .. } => wrong(
            "the store answered 200 to a second create-only PUT of one key: it ignores \
             If-None-Match",
        ),
        Created::Taken(object) if object.bytes == present => Ok(()),
        Created::Taken(_) => wrong("a create-only PUT that was refused changed the object"),
    }
}

async fn compare_and_swap(client: &ObjectClient, folder: &str) -> Result<(), Failure> {
    let name = format!("{folder}/swap");
    let Created::New { etag: first } = client.create(&name, &body("1")).await? else {
        return wrong("a create-only PUT of a key that is not there was refused");
    };
    let Swapped::New { etag: second } = client.swap(&name, &body("2"), &first).await? else {
        return wrong("a PUT with the ETag of the present version was refused");
    };
    match client.get(&name, None).await? {
        Some(Object { bytes, etag }) if bytes == "2" && etag == second => {}
        _ => return wrong("a read does not have the bytes and the ETag of the PUT before it"),
    }
    refuses_to_swap(client, &name, &first, "2").await?;
    // A PUT without a condition makes a new version too.
    client.put(&name, &body("3")).await?;
    refuses_to_swap(client, &name, &second, "3").await?;
    let name = format!("{folder}/swap-missing");
    if let Swapped::New { .. } = client.swap(&name, &body("4"), &second).await? {
        return wrong("a PUT with an ETag of a key that is not there created the object");
    }
    match client.get(&name, None).await? {
        Some(_) => wrong("a PUT with an ETag that was refused created the object"),
        None => Ok(()),
    }
}

async fn refuses_to_swap(
    client: &ObjectClient,
    name: &str,
    stale: &str,
    present: &str,
) -> Result<(), Failure> {
    match client.swap(name, &body("stale"), stale).await? {
        Swapped::New { .. } => {
            wrong("the store answered 200 to a PUT with a stale ETag: it ignores If-Match")
        }
        Swapped::Changed(Some(object)) if object.bytes == present => Ok(()),
        Swapped::Changed(_) => wrong("a PUT with a stale ETag that was refused changed the object"),
    }
}

async fn race_to_create(client: &ObjectClient, folder: &str) -> Result<(), Failure> {
    for race in 0..RACES {
        let name = format!("{folder}/race-{race}");
        let bodies: Vec<Bytes> = (0..RACERS).map(|racer| body(format!("racer {racer}"))).collect();
        let racing = bodies.iter().map(|body| client.create(&name, body));
        let (mut winners, mut seen) = (Vec::new(), Vec::new());
        for (racer, created) in join_all(racing).await.into_iter().enumerate() {
            match created? {
                Created::New { .. } => winners.push(racer),
                Created::Taken(object) => seen.push(object.bytes),
            }
        }
        let [winner] = winners[..] else {
            return wrong(format!(
                "the store answered 200 to {} of {RACERS} clients that created one key at once: it \
                 checks If-None-Match before it writes, not while it writes",
                winners.len()
            ));
        };
        seen.extend(client.get(&name, None).await?.map(|object| object.bytes));
        if seen.len() != RACERS || seen.iter().any(|bytes| *bytes != bodies[winner]) {
            return wrong("the object that a client created alone has the bytes of another client");
        }
    }
    Ok(())
}

async fn race_to_swap(client: &ObjectClient, folder: &str) -> Result<(), Failure> {
    let name = format!("{folder}/counter");
    let Created::New { .. } = client.create(&name, &body("0 -")).await? else {
        return wrong("a create-only PUT of a key that is not there was refused");
    };
    try_join_all((0..COUNTERS).map(|task| increment(client, &name, task))).await?;
    let present = client.get(&name, None).await?.and_then(|object| value(&object));
    let expected = COUNTERS * INCREMENTS;
    // More is possible: a swap whose answer was lost may be replaced before it is read back.
    match present {
        Some(value) if value >= expected => Ok(()),
        value => wrong(format!(
            "a counter that was incremented {expected} times by compare and swap is {}: the store \
             checks If-Match before it writes, not while it writes",
            value.map_or("gone".to_owned(), |value| value.to_string())
        )),
    }
}

/// The counter's value: the first word of its object.
fn value(object: &Object) -> Option<usize> {
    std::str::from_utf8(&object.bytes).ok()?.split(' ').next()?.parse().ok()
}

/// Increments the counter as one task.
async fn increment(client: &ObjectClient, name: &str, task: usize) -> Result<(), Failure> {
    let mut present = client.get(name, None).await?;
    let mut done = 0;
    for attempt in 0..SWAPS_MAX {
        let Some((object, value)) = present.as_ref().and_then(|it| Some((it, value(it)?))) else {
            return wrong("a counter that clients swap is gone");
        };
        let next = body(format!("{} {task} {attempt}", value + 1));
        match client.swap(name, &next, &object.etag).await? {
            Swapped::New { etag } => {
                done += 1;
                if done == INCREMENTS {
                    return Ok(());
                }
                present = Some(Object { bytes: next, etag });
            }
            Swapped::Changed(object) => present = object,
        }
    }
    wrong(format!("no progress: {SWAPS_MAX} times a client's compare and swap was refused"))
}
