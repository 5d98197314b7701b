//! The preflight, with a store that is right and with stores that are not.

use std::sync::Arc;

use blockyard_object::preflight::{PreflightReport, preflight};
use blockyard_object::{
    BucketError, BucketSettings, BucketStore, ObjectClient, ObjectError, Opening, Retries,
};
use futures::StreamExt;
use object_store::ObjectStore;

use crate::doubles::{Connection, Fault, Flaw, Flawed, memory, run};

/// Runs it, and checks that nothing is left.
fn report(store: Arc<dyn ObjectStore>) -> PreflightReport {
    run(async {
        let client = ObjectClient::over(store.clone(), "pool", Retries::default());
        let report = preflight(&client).await.unwrap();
        assert_eq!(client.requests(), report.requests);
        report
    })
}

async fn objects(store: &Arc<dyn ObjectStore>) -> usize {
    store.list(None).count().await
}

#[test]
fn a_right_store_passes_and_nothing_is_left() {
    let store = memory();
    let report = report(store.clone());
    assert_eq!(report.failure(), None, "{report:?}");
    assert_eq!(report.checks.len(), 6);
    assert_eq!(run(objects(&store)), 0);
    // 128 racers and what creates one key alone.
    assert!(report.requests.create.requests > 128, "{:?}", report.requests);
}

#[test]
fn a_store_that_ignores_conditions_is_refused() {
    let store: Arc<dyn ObjectStore> = Arc::new(Flawed::new(Flaw::IgnoresConditions));
    let report = report(store.clone());
    let expected = "the store answered 200 to a second create-only PUT of one key: it ignores \
                    If-None-Match";
    assert_eq!(report.failure(), Some(expected));
    let failed =
        |name: &str| report.checks.iter().any(|it| it.name == name && it.failure.is_some());
    assert!(failed("compare and swap") && failed("race to create") && failed("race to swap"));
    assert!(!failed("read after write") && !failed("list after write"));
    assert_eq!(run(objects(&store)), 0);
}

#[test]
fn each_flaw_is_named() {
    for (flaw, name, text) in [
        (Flaw::IgnoresIfMatch, "compare and swap", "a stale ETag: it ignores If-Match"),
        (Flaw::ChecksThenWrites, "race to create", "before it writes, not while it writes"),
        (Flaw::RefusesConditions, "create only", "the store answered 501 NotImplemented"),
        (Flaw::ListsLate, "list after write", "a listing lacks 1 of 20 objects"),
        (Flaw::ListsDeleted, "list after write", "a listing after a DELETE"),
        (Flaw::ReadsStale, "read after write", "what was there before the PUT"),
    ] {
        let report = report(Arc::new(Flawed::new(flaw)));
        let first = report.checks.iter().find(|check| check.failure.is_some());
        let first = first.unwrap_or_else(|| panic!("{flaw:?} was not found"));
        assert_eq!(first.name, name, "{flaw:?}");
        assert!(first.failure.as_ref().unwrap().contains(text), "{flaw:?}: {first:?}");
    }
}

#[test]
fn no_pool_is_made_in_a_store_that_does_not_keep_a_second_opener_out() {
    for (flaw, text) in [
        (Flaw::IgnoresConditions, "it ignores If-None-Match"),
        (Flaw::ChecksThenWrites, "before it writes, not while it writes"),
        (Flaw::RefusesConditions, "the store answered 501 NotImplemented"),
    ] {
        let store: Arc<dyn ObjectStore> = Arc::new(Flawed::new(flaw));
        let client = ObjectClient::over(Arc::clone(&store), "pool", Retries::default());
        let request = Opening { capacity_bytes: Some(1 << 30), ..Opening::default() };
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = Arc::new(runtime.enable_time().start_paused(true).build().unwrap());
        let settings = BucketSettings::default();
        let error = BucketStore::open(Arc::new(client), settings, request, &runtime).unwrap_err();
        assert!(matches!(&error, BucketError::Unfenced { .. }), "{flaw:?}: {error}");
        assert!(error.to_string().contains(text), "{flaw:?}: {error}");
        assert_eq!(run(objects(&store)), 0, "{flaw:?}");
    }
}

#[test]
fn a_store_that_cannot_be_used_is_an_error() {
    run(async {
        let store = Arc::new(Connection::new(memory(), &[Fault::Denied], &[]));
        let error =
            preflight(&ObjectClient::over(store, "pool", Retries::default())).await.unwrap_err();
        assert!(error.to_string().ends_with("the store answered 403 AccessDenied"), "{error}");
    });
}

#[test]
fn lost_answers_do_not_make_a_right_store_fail() {
    use Fault::{HangsAfterEffect, LostAnswer, LostRequest, None, Overloaded};
    let plan = [LostAnswer, None, HangsAfterEffect, Overloaded, LostRequest, None];
    let puts: Vec<Fault> = plan.into_iter().cycle().take(600).collect();
    let report = report(Arc::new(Connection::new(memory(), &puts, &[])));
    assert_eq!(report.failure(), Option::None, "{report:?}");
    assert!(report.requests.create.failed > 50, "{:?}", report.requests);
}

/// The client may have no connection any more. That says nothing about the store.
#[test]
fn a_store_that_stops_answering_has_not_failed_a_check() {
    let mut puts = vec![Fault::None; 30];
    puts.extend(vec![Fault::LostRequest; 10_000]);
    run(async {
        let store = Arc::new(Connection::new(memory(), &puts, &[]));
        let checked = preflight(&ObjectClient::over(store, "pool", Retries::default())).await;
        assert!(matches!(checked, Err(ObjectError::Unavailable { .. })), "{checked:?}");
    });
}
