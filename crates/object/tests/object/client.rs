//! Ambiguous answers: what the client finds out, and by which requests.

use std::sync::Arc;

use blockyard_object::{Created, ListedObject, ObjectClient, ObjectError, Retries, Swapped};
use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};

use crate::doubles::{Connection, FAULTS, Fault, memory, present, run};

fn client(store: &Arc<dyn ObjectStore>, puts: &[Fault]) -> ObjectClient {
    let connection = Connection::new(store.clone(), puts, &[]);
    ObjectClient::over(Arc::new(connection), "pool", Retries::default())
}

fn body(text: &str) -> Bytes {
    Bytes::from(text.to_owned())
}

#[test]
fn an_object_is_created_once_whatever_happens_to_the_request() {
    for fault in FAULTS {
        run(async {
            let store = memory();
            let created = client(&store, &[fault]).create("a", &body("mine")).await.unwrap();
            assert!(matches!(created, Created::New { .. }), "{fault:?}: {created:?}");
            assert_eq!(present(&store, "pool/a").await, Some(body("mine")), "{fault:?}");

            let other = client(&store, &[fault]).create("a", &body("other")).await.unwrap();
            let Created::Taken(object) = other else { panic!("{fault:?}: {other:?}") };
            assert_eq!(object.bytes, "mine", "{fault:?}");
            assert_eq!(present(&store, "pool/a").await, Some(body("mine")), "{fault:?}");
        });
    }
}

#[test]
fn an_object_is_swapped_once_whatever_happens_to_the_request() {
    for fault in FAULTS {
        run(async {
            let store = memory();
            let Created::New { etag } = client(&store, &[]).create("a", &body("1")).await.unwrap()
            else {
                panic!("a fresh name is taken")
            };
            let swapped = client(&store, &[fault]).swap("a", &body("2"), &etag).await.unwrap();
            assert!(matches!(swapped, Swapped::New { .. }), "{fault:?}: {swapped:?}");
            assert_eq!(present(&store, "pool/a").await, Some(body("2")), "{fault:?}");

            let late = client(&store, &[fault]).swap("a", &body("3"), &etag).await.unwrap();
            let Swapped::Changed(Some(object)) = late else { panic!("{fault:?}: {late:?}") };
            assert_eq!(object.bytes, "2", "{fault:?}");
            // The version that it returns is the one to swap next.
            let next = client(&store, &[fault]).swap("a", &body("4"), &object.etag).await.unwrap();
            assert!(matches!(next, Swapped::New { .. }), "{fault:?}: {next:?}");
            let gone = client(&store, &[fault]).swap("b", &body("5"), &etag).await.unwrap();
            assert_eq!(gone, Swapped::Changed(None), "{fault:?}");
            assert_eq!(present(&store, "pool/b").await, None, "{fault:?}");
        });
    }
}

/// Two writers race with every pair of faults of each: 4,096 races of each operation.
#[test]
fn of_two_writers_one_wins_and_the_other_learns_who() {
    let pairs = || FAULTS.iter().flat_map(|first| FAULTS.map(|second| [*first, second]));
    for (mine, other) in pairs().flat_map(|mine| pairs().map(move |other| (mine, other))) {
        run(async {
            let store = memory();
            let names = ["mine", "other"].map(body);
            let clients = [client(&store, &mine), client(&store, &other)];
            let racing = [0, 1].map(|at| clients[at].create("a", &names[at]));
            let created = futures::future::join_all(racing).await;
            let object = present(&store, "pool/a").await.unwrap();
            for (created, name) in created.into_iter().zip(&names) {
                match created.unwrap() {
                    Created::New { .. } => assert_eq!(object, name, "{mine:?} {other:?}"),
                    Created::Taken(present) => {
                        assert_eq!(object, present.bytes);
                        assert_ne!(object, name, "{mine:?} {other:?}");
                    }
                }
            }

            let etag = client(&store, &[]).get("a", None).await.unwrap().unwrap().etag;
            let names = ["2 mine", "2 other"].map(body);
            let clients = [client(&store, &mine), client(&store, &other)];
            let racing = [0, 1].map(|at| clients[at].swap("a", &names[at], &etag));
            let swapped = futures::future::join_all(racing).await;
            let object = present(&store, "pool/a").await.unwrap();
            for (swapped, name) in swapped.into_iter().zip(&names) {
                match swapped.unwrap() {
                    Swapped::New { .. } => assert_eq!(object, name, "{mine:?} {other:?}"),
                    Swapped::Changed(present) => {
                        assert_eq!(object, present.unwrap().bytes);
                        assert_ne!(object, name, "{mine:?} {other:?}");
                    }
                }
            }
        });
    }
}

#[test]
fn the_read_back_is_tried_again_too() {
    run(async {
        let gets = [Fault::LostAnswer, Fault::Overloaded, Fault::Hangs];
        let store = memory();
        let connection = Connection::new(store.clone(), &[Fault::LostAnswer], &gets);
        let client = ObjectClient::over(Arc::new(connection), "pool", Retries::default());
        let created = client.create("a", &body("mine")).await.unwrap();
        assert!(matches!(created, Created::New { .. }));
        let requests = client.requests();
        assert_eq!((requests.create.requests, requests.create.failed), (1, 1));
        assert_eq!((requests.get.requests, requests.get.failed), (4, 3));
        assert_eq!((requests.create.bytes, requests.get.bytes), (4, 4));
    });
}

#[test]
fn a_store_that_does_not_answer_is_unavailable_and_a_refusal_is_final() {
    run(async {
        let store = memory();
        let dead = client(&store, &[Fault::Hangs; 50]);
        let started = tokio::time::Instant::now();
        let error = dead.put("a", &body("mine")).await.unwrap_err();
        let seconds = started.elapsed().as_secs();
        assert!((50..=75).contains(&seconds), "gave up after {seconds} s");
        assert!(error.is_transient());
        let text = error.to_string();
        assert!(text.starts_with("cannot write object `a`: no success in "), "{text}");
        assert!(text.ends_with("the last: no answer within 10 s"), "{text}");

        let denied = client(&store, &[Fault::Denied]);
        let error = denied.create("a", &body("mine")).await.unwrap_err();
        assert!(!error.is_transient());
        let text = "cannot create object `a`: the store answered 403 AccessDenied";
        assert_eq!(error.to_string(), text);
        assert_eq!(denied.requests().total(), 1);
        assert!(matches!(denied.get("../a", None).await, Err(ObjectError::Refused { .. })));
    });
}

#[test]
fn objects_are_read_in_parts_listed_and_deleted() {
    run(async {
        let store = memory();
        let connection = Connection::new(store.clone(), &[], &[]);
        let connection = Arc::new(connection);
        let client = ObjectClient::over(connection.clone(), "pool", Retries::default());
        assert_eq!(client.get("a/1", None).await.unwrap(), None);
        for at in 0..10 {
            client.put(&format!("a/{at}"), &body("0123456789")).await.unwrap();
        }
        client.put("ab/x", &body("x")).await.unwrap();
        let part = client.get("a/1", Some(2..5)).await.unwrap().unwrap();
        assert_eq!(part.bytes, "234");
        let part = client.get("a/1", Some(8..50)).await.unwrap().unwrap();
        assert_eq!(part.bytes, "89");

        // The listing breaks after three objects, and goes on there.
        connection.gets.lock().unwrap().push_back(Fault::LostAnswer);
        let listed = client.list("a").await.unwrap();
        let expected = (0..10).map(|at| ListedObject { name: format!("a/{at}"), len: 10 });
        assert_eq!(listed, expected.collect::<Vec<_>>());
        assert_eq!(client.list("").await.unwrap().len(), 11);
        // Consoles make empty objects for folders.
        for folder in ["pool", "pool/a"] {
            store.put(&Path::from(folder), PutPayload::new()).await.unwrap();
        }
        assert_eq!(client.list("a").await.unwrap(), listed);
        store.delete(&Path::from("pool/a")).await.unwrap();
        assert_eq!(client.list("").await.unwrap().len(), 11);

        let names: Vec<String> = listed.into_iter().map(|it| it.name).collect();
        client.delete(&names).await.unwrap();
        client.delete(&names).await.unwrap();
        client.delete::<String>(&[]).await.unwrap();
        assert_eq!(client.list("").await.unwrap(), [ListedObject { name: "ab/x".into(), len: 1 }]);
        assert_eq!(client.requests().delete.requests, 2);
    });
}
