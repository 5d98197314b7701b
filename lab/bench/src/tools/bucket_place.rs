//! The location of measured pools in an object store: MinIO on this machine, with a bucket that is
//! made once in a run. MinIO syncs each object before it answers.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};

use blockyard_object::{
    Access, BucketSettings, BucketStore, ObjectClient, ObjectUri, Opening, ProvidedStore, Retries,
};
use blockyard_store::remote::UploadStatus;
use blockyard_store::{PoolBacking, PoolStore};
use blockyard_testing::s3_server::{KEY_ID, S3Program, S3Server, SECRET_KEY};
use blockyard_testing::s3_witness::S3Witness;
use blockyard_volume::{Options, Running};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Notify;

use crate::error::LabError;
use crate::experiment::Settings;
use crate::tools::pool_place::{self, VOLUME};

const BUCKET: &str = "lab";

/// The object store of a run, which the first measurement starts.
#[derive(Clone, Debug, Default)]
pub struct SharedBucket(Arc<OnceLock<Result<Arc<LabBucket>, String>>>);

impl SharedBucket {
    /// The object store.
    ///
    /// # Errors
    /// If it was not built or does not start, or the directory for its objects is not on a disk.
    pub fn get(&self, settings: &Settings) -> Result<Arc<LabBucket>, LabError> {
        let place = pool_place::place(settings)?;
        if !S3Program::Minio.is_built() {
            return Err(LabError::missing("MinIO", "run `make object-stores`"));
        }
        let start = || LabBucket::start(place).map(Arc::new).map_err(|error| error.to_string());
        self.0.get_or_init(start).clone().map_err(|why| LabError::failed("MinIO", why))
    }
}

/// A running object store with a bucket.
#[derive(Debug)]
pub struct LabBucket {
    server: S3Server,
    runtime: Arc<Runtime>,
    /// Ends the thread of the runtime.
    stop: Arc<Notify>,
    thread: Option<JoinHandle<()>>,
    directory: PathBuf,
}

/// A pool in the bucket as data.
#[derive(Clone, Copy, Debug)]
pub struct BucketPool {
    /// The name, which is the prefix of its objects.
    pub name: &'static str,
    /// How the pool's store is opened.
    pub settings: BucketSettings,
    /// Length of a block of its volume, in bytes.
    pub block_bytes: u32,
    /// Length of its volume, in bytes.
    pub volume_bytes: u64,
    /// Most bytes of the pool.
    pub capacity_bytes: u64,
}

/// An open pool in the bucket.
#[derive(Clone, Debug)]
pub struct OpenBucketPool {
    /// The pool, with the same storage as in the daemon.
    pub running: Arc<Running>,
    /// The client of the pool, which counts its requests.
    pub client: Arc<ObjectClient>,
}

impl OpenBucketPool {
    /// What the object store lacks.
    pub fn upload_status(&self) -> UploadStatus {
        self.running.pool().segments().directory().upload_status().unwrap_or_default()
    }
}

impl LabBucket {
    fn start(place: &Path) -> Result<LabBucket, LabError> {
        let missing = || LabError::missing("MinIO", "unset BLOCKYARD_TEST_SKIP");
        let server = S3Program::Minio.start(place).ok_or_else(missing)?;
        // It makes the bucket, and is needed no more.
        S3Witness::start(&server.endpoint(), BUCKET).ok_or_else(missing)?;
        let io = LabError::io("the thread of the object store");
        let runtime = Arc::new(Builder::new_current_thread().enable_all().build().map_err(io)?);
        let stop = Arc::<Notify>::default();
        let (runs, stopped) = (Arc::clone(&runtime), Arc::clone(&stop));
        // As in the product, one thread sends all requests.
        let named = thread::Builder::new().name("object-store".to_owned());
        let thread = named
            .spawn(move || runs.block_on(stopped.notified()))
            .map_err(LabError::io("the thread of the object store"))?;
        let (thread, directory) = (Some(thread), place.to_owned());
        Ok(LabBucket { server, runtime, stop, thread, directory })
    }

    /// The runtime on which clients of the bucket run.
    pub fn runtime(&self) -> &Arc<Runtime> {
        &self.runtime
    }

    /// A client of a prefix of the bucket.
    ///
    /// # Errors
    /// If the endpoint is not valid.
    pub fn client(&self, prefix: &str) -> Result<Arc<ObjectClient>, LabError> {
        let failed = |error| LabError::failed(format!("s3://{BUCKET}/{prefix}"), error);
        let access = Access::to_endpoint(&self.server.endpoint(), KEY_ID, SECRET_KEY);
        let uri = ObjectUri::parse(&format!("s3://{BUCKET}/{prefix}")).map_err(failed)?;
        let client = ObjectClient::connect(&uri, &access.map_err(failed)?, Retries::default());
        Ok(Arc::new(client.map_err(failed)?))
    }

    /// The directory of the cache of all pools, one of which is open at a time.
    fn cache(&self) -> PathBuf {
        self.directory.join("cache")
    }

    /// Removes what the cache has, so that the next pool is opened as on another machine.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub fn clear_cache(&self) -> Result<(), LabError> {
        let cache = self.cache();
        match std::fs::remove_dir_all(&cache) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(LabError::io(cache.display().to_string())(error))
            }
            _ => Ok(()),
        }
    }

    /// Opens a pool, and makes it and its volume first if it is not there.
    ///
    /// # Errors
    /// If the object store or the pool refuses it.
    pub fn open(&self, pool: &BucketPool) -> Result<OpenBucketPool, LabError> {
        let failed = |error: &dyn std::fmt::Display| LabError::failed(pool.name, error.to_string());
        let cache = self.cache();
        let log = pool.settings.local.map(|_| self.directory.join(format!("{}.log", pool.name)));
        let request = Opening {
            cache: Some(&cache),
            log: log.as_deref(),
            capacity_bytes: Some(pool.capacity_bytes),
            take_over: true,
            ..Opening::default()
        };
        let client = self.client(pool.name)?;
        let store = BucketStore::open(Arc::clone(&client), pool.settings, request, &self.runtime);
        let store = ProvidedStore::unlocked(store.map_err(|error| failed(&error))?);
        let path = PathBuf::from(format!("s3://{BUCKET}/{}", pool.name));
        let store = PoolStore::of_remote(&path, Box::new(store));
        let segment_bytes = pool.settings.segment_bytes;
        let options = Options { segment_bytes, ..Options::default() };
        let running = Running::start(PoolBacking::single(store, path), options);
        let running = running.map_err(|error| failed(&error))?;
        if running.pool().list().is_empty() {
            let made = running.create(VOLUME, pool.volume_bytes, pool.block_bytes);
            made.map_err(|error| failed(&error))?;
        }
        Ok(OpenBucketPool { running, client })
    }
}

impl Drop for LabBucket {
    fn drop(&mut self) {
        self.stop.notify_one();
        if let Some(thread) = self.thread.take() {
            // The panic was reported when it happened.
            _ = thread.join();
        }
    }
}
