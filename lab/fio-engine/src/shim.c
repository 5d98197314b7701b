/* SPDX-License-Identifier: MIT
 *
 * What fio sees of Blockyard: its table of hooks. The C compiler knows the layout of fio's
 * structures, so this file reads and fills them; what the hooks do stands in exports.rs.
 */
#include <ctype.h>
#include "fio.h"
#include "lib/roundup.h"
#include "optgroup.h"
#include "zbd.h"

struct options {
	void *pad; /* fio wants a spare pointer first. */
	char *dev, *before;
};

static struct fio_option options[] = {
	{ .name = "dev", .lname = "Blockyard device", .type = FIO_OPT_STR_STORE,
	  .off1 = offsetof(struct options, dev), .category = FIO_OPT_C_ENGINE,
	  .help = "Device URI (null:///n0?size=10G), or a yard in TOML (yard.toml, yard.toml#name)" },
	{ .name = "before", .lname = "Blockyard baseline", .type = FIO_OPT_STR_STORE,
	  .off1 = offsetof(struct options, before), .category = FIO_OPT_C_ENGINE,
	  .help = "Take the device as it was before a technique: the name of a baseline" },
	{ .name = NULL },
};

#define rare(condition) __builtin_expect(!!(condition), 0)

/* The same structures stand in exports.rs. */
struct ask {
	const char *dev, *before, *scheduler, *file;
	void (*say)(const char *line);
	unsigned int depth, zbd, durable;
};
struct end { struct io_u *io_u; int error; };
struct row { uint64_t start, wp, len, capacity; unsigned int type, cond; };

#pragma GCC visibility push(hidden)
void *blockyard_fio_job(void);
void blockyard_fio_end(void *job);
void *blockyard_fio_handle(void *job, const struct ask *ask);
int blockyard_fio_open(void *job, const struct ask *ask);
void blockyard_fio_forget(void *job);
int blockyard_fio_memory(void *handle, void *base, uint64_t len);
uint64_t blockyard_fio_size(const void *handle);
int blockyard_fio_carry(void *handle, unsigned int ddir, uint64_t offset, void *buf, uint64_t len);
int blockyard_fio_push(void *handle, unsigned int ddir, uint64_t offset, void *buf, uint64_t len,
		       unsigned int ioprio, struct io_u *io_u);
int blockyard_fio_await(void *handle);
void blockyard_fio_submit(void *job);
int blockyard_fio_reap(void *job, struct end *ends, unsigned int min, unsigned int max);
int blockyard_fio_zoned(const void *handle);
int blockyard_fio_limit(const void *handle, int active);
int blockyard_fio_report(const void *handle, uint64_t from, struct row *rows, unsigned int max);
int blockyard_fio_manage(void *handle, int finish, uint64_t from, uint64_t len);
int blockyard_fio_write(void *handle, uint64_t offset, const void *buf, uint64_t len);
void blockyard_fio_exit(void);
extern struct ioengine_ops blockyard_fio_table;
#pragma GCC visibility pop

/* What a job holds. `ended` is a ring of at least the job's depth: from `head` to `tail` lie the
 * I/Os that have ended, of which fio may see those before `seen`, and was last shown those from
 * `shown` on. `pushed` are those that a channel has not started yet, `below` all that it has. */
struct job {
	void *rust_job, *buffer;
	uint64_t buffer_len;
	struct io_u **ended, **pushed;
	struct end *reaped;
	unsigned int mask, head, seen, tail, shown, count, below;
	bool sync;
};

static void say(const char *line)
{
	log_err("fio: blockyard: %s\n", line);
}

static struct ask ask_of(struct thread_data *td, struct fio_file *f)
{
	struct options *o = td->eo;

	return (struct ask) {
		.dev = o->dev, .before = o->before, .scheduler = td->o.ioscheduler,
		.file = f ? f->file_name : NULL, .say = say, .depth = td->o.iodepth,
		.zbd = td->o.zone_mode == ZONE_MODE_ZBD, .durable = td->o.sync_io != 0,
	};
}

/* fio compares the number of its interface, but not the layout of its structures. */
static bool is_built_for(const char *fio)
{
	size_t len = strlen(BUILT_FOR);

	return !strncmp(fio, BUILT_FOR, len) && fio[len] != '.' && !isdigit(fio[len]);
}

static struct job *job_of(struct thread_data *td)
{
	struct job *job = td->io_ops_data;

	if (job)
		return job;
	if (!is_built_for(fio_version_string)) {
		log_err("fio: blockyard: built for " BUILT_FOR ", and this is %s: run `make fio` with "
			"FIO_SRC= the source of this one\n", fio_version_string);
		return NULL;
	}
	job = calloc(1, sizeof(*job));
	if (job && (job->rust_job = blockyard_fio_job()))
		return td->io_ops_data = job;
	free(job);
	say("no memory for a job");
	return NULL;
}

/* The device of a file: entered by whichever hook comes first. */
static int size(struct thread_data *td, struct fio_file *f)
{
	struct job *job = job_of(td);
	struct ask ask = ask_of(td, f);

	if (!td->o.use_thread)
		say("thread=0: every job would have a device of its own; add thread=1 (--thread)");
	else if (job && !FILE_ENG_DATA(f))
		FILE_SET_ENG_DATA(f, blockyard_fio_handle(job->rust_job, &ask));
	if (!FILE_ENG_DATA(f))
		return 1; /* Why has been said, and that is enough: td_verror would add a line. */
	f->filetype = FIO_TYPE_BLOCK;
	f->real_file_size = blockyard_fio_size(FILE_ENG_DATA(f));
	fio_file_set_size_known(f);
	return 0;
}

static int setup(struct thread_data *td)
{
	struct fio_file *f;
	unsigned int i;

	for_each_file(td, f, i)
		if (size(td, f))
			return 1;
	return 0;
}

static int init(struct thread_data *td)
{
	enum fio_ioengine_flags flag = td->o.iodepth > 1 ? FIO_ASYNCIO_SETS_ISSUE_TIME : FIO_SYNCIO;
	struct ask ask = ask_of(td, NULL);
	struct job *job;

	if (setup(td))
		return 1;
	job = td->io_ops_data;
	job->sync = td->o.iodepth == 1;
	job->mask = roundup_pow2(td->o.iodepth) - 1;
	job->ended = calloc(job->mask + 1, sizeof(*job->ended));
	job->pushed = calloc(td->o.iodepth, sizeof(*job->pushed));
	job->reaped = calloc(td->o.iodepth, sizeof(*job->reaped));
	if (!job->ended || !job->pushed || !job->reaped || blockyard_fio_open(job->rust_job, &ask))
		return 1;
	/* In the job's own flags: those of the table are shared with jobs of other depths. */
	td->flags |= (unsigned long long) flag << TD_ENG_FLAG_SHIFT;
	return 0;
}

static void cleanup(struct thread_data *td)
{
	struct job *job = td->io_ops_data;

	if (!job)
		return;
	blockyard_fio_end(job->rust_job);
	free(job->ended);
	free(job->pushed);
	free(job->reaped);
	free(job);
	td->io_ops_data = NULL;
}

static int adopt(struct thread_data *td, struct fio_file *f)
{
	return blockyard_fio_memory(FILE_ENG_DATA(f), td->orig_buffer, td->orig_buffer_size);
}

/* fio has made its buffers, or has made them again for a log with larger blocks. */
static int memory(struct thread_data *td)
{
	struct job *job = td->io_ops_data;
	struct fio_file *f;
	unsigned int i;

	/* A file that a log has named, and not yet opened, has no handle. */
	for_each_file(td, f, i)
		if (FILE_ENG_DATA(f) && adopt(td, f)) {
			say("a device does not take fio's buffers");
			return 1;
		}
	job->buffer = td->orig_buffer;
	job->buffer_len = td->orig_buffer_size;
	return 0;
}

/* A file that a log names after `init` gets its handle here; all others have theirs. */
static int open_file(struct thread_data *td, struct fio_file *f)
{
	struct job *job;
	struct ask ask = ask_of(td, f);

	if (FILE_ENG_DATA(f))
		return 0;
	if (size(td, f))
		return 1;
	job = td->io_ops_data;
	if (job->ended && blockyard_fio_open(job->rust_job, &ask))
		return 1;
	if (job->buffer && adopt(td, f)) {
		say("a device does not take fio's buffers");
		return 1;
	}
	return 0;
}

/* fio is about to free its buffers. */
static void io_u_free(struct thread_data *td, struct io_u *io_u)
{
	struct job *job = td->io_ops_data;

	if (job)
		blockyard_fio_forget(job->rust_job);
}

/* With zonemode=zbd a trim is a reset where the zone has a write pointer. */
static bool __attribute__((noinline)) trimmed(struct thread_data *td, struct io_u *io_u)
{
	struct job *job = td->io_ops_data;
	struct timespec now;
	int ret = 0;

	if (io_u->ddir == DDIR_TRIM && td->o.zone_mode == ZONE_MODE_ZBD) {
		fio_gettime(&now, NULL);
		ret = zbd_do_io_u_trim(td, io_u);
		/* What ends on the spot is not seen by `commit`, which stamps everything else. */
		if (ret && !job->sync && fio_fill_issue_time(td))
			io_u->issue_time = now;
	}
	if (ret < 0)
		io_u->error = -ret;
	return ret != 0;
}

static int push(struct io_u *io_u)
{
	return blockyard_fio_push(FILE_ENG_DATA(io_u->file), io_u->ddir, io_u->offset,
				  io_u->xfer_buf, io_u->xfer_buflen, io_u->ioprio, io_u);
}

/* An I/O that did not complete at once: `error` is an errno, or -1 to send it over the channel. */
static enum fio_q_status __attribute__((noinline))
queue_rest(struct thread_data *td, struct io_u *io_u, int error)
{
	struct job *job = td->io_ops_data;

	if (error < 0) {
		error = push(io_u);
		/* fio makes its buffers again if a log that it replays has larger blocks than before. */
		if (error == EINVAL && (job->buffer != td->orig_buffer ||
					job->buffer_len != td->orig_buffer_size))
			error = memory(td) ? EIO : push(io_u);
		if (!error && !job->sync) {
			job->pushed[job->count++] = io_u;
			job->below++;
			return FIO_Q_QUEUED;
		}
		if (!error)
			error = blockyard_fio_await(FILE_ENG_DATA(io_u->file));
	}
	io_u->error = error;
	return FIO_Q_COMPLETED;
}

/* Never FIO_Q_BUSY: for a zoned write fio would let go of its zone and keep the offset. */
static enum fio_q_status queue(struct thread_data *td, struct io_u *io_u)
{
	struct job *job = td->io_ops_data;
	int error;

	if (rare(io_u->ddir > DDIR_WRITE) && trimmed(td, io_u))
		return FIO_Q_COMPLETED;
	error = blockyard_fio_carry(FILE_ENG_DATA(io_u->file), io_u->ddir, io_u->offset,
				    io_u->xfer_buf, io_u->xfer_buflen);
	if (rare(error))
		return queue_rest(td, io_u, error);
	if (job->sync)
		return FIO_Q_COMPLETED;
	job->ended[job->tail++ & job->mask] = io_u;
	return FIO_Q_QUEUED;
}

static void stamp(struct thread_data *td, struct io_u *io_u, const struct timespec *now)
{
	io_u->issue_time = *now;
	io_u_queued(td, io_u);
}

static int commit(struct thread_data *td)
{
	struct job *job = td->io_ops_data;
	struct timespec now;
	unsigned int i, count = job->tail - job->seen + job->count;

	if (!count)
		return 0;
	if (fio_fill_issue_time(td)) {
		fio_gettime(&now, NULL);
		for (i = job->seen; i != job->tail; i++)
			stamp(td, job->ended[i & job->mask], &now);
		for (i = 0; i < job->count; i++)
			stamp(td, job->pushed[i], &now);
		if (td->o.read_iolog_file)
			td->last_issue = now;
	}
	io_u_mark_submit(td, count);
	/* What ended on the spot may be seen from now on; the rest is started. */
	job->seen = job->tail;
	job->count = 0;
	if (job->below)
		blockyard_fio_submit(job->rust_job);
	return 0;
}

/* Ends every I/O in flight with an error: after a panic, the device completes none of them. */
static void __attribute__((noinline)) fail(struct thread_data *td, int error)
{
	struct job *job = td->io_ops_data;
	struct io_u *io_u;
	unsigned int i, at;

	io_u_qiter(&td->io_u_all, io_u, i) {
		if (!(io_u->flags & IO_U_F_FLIGHT))
			continue;
		for (at = job->head; at != job->tail && job->ended[at & job->mask] != io_u; at++)
			;
		if (at != job->tail)
			continue;
		io_u->error = error;
		job->ended[job->tail++ & job->mask] = io_u;
	}
	job->below = 0;
	job->seen = job->tail;
}

static int getevents(struct thread_data *td, unsigned int min, unsigned int max,
		     const struct timespec *t)
{
	struct job *job = td->io_ops_data;
	unsigned int count = min(job->seen - job->head, max);
	int i, reaped;

	/* With min > 0 fio has committed before; what it has not committed stays unseen. */
	if (job->below && count < max && job->seen == job->tail && !job->count) {
		reaped = blockyard_fio_reap(job->rust_job, job->reaped, min > count ? min - count : 0,
					    max - count);
		if (reaped < 0) {
			fail(td, -reaped);
			count = min(job->seen - job->head, max);
			reaped = 0;
		}
		for (i = 0; i < reaped; i++) {
			job->reaped[i].io_u->error = job->reaped[i].error;
			job->ended[job->tail++ & job->mask] = job->reaped[i].io_u;
		}
		job->seen = job->tail;
		job->below -= reaped;
		count += reaped;
	}
	job->shown = job->head;
	job->head += count;
	return count;
}

static struct io_u *event(struct thread_data *td, int i)
{
	struct job *job = td->io_ops_data;

	return job->ended[(job->shown + i) & job->mask];
}

static int nothing(struct thread_data *td, struct fio_file *f)
{
	return 0;
}

/* For the zones' hooks fio wants both. */
static int told(int ret)
{
	if (ret < 0)
		errno = -ret;
	return ret;
}

static int zoned_model(struct thread_data *td, struct fio_file *f, enum zbd_zoned_model *model)
{
	*model = blockyard_fio_zoned(FILE_ENG_DATA(f)) ? ZBD_HOST_MANAGED : ZBD_NONE;
	return 0;
}

static int report_zones(struct thread_data *td, struct fio_file *f, uint64_t from,
			struct zbd_zone *zones, unsigned int max)
{
	struct row rows[64];
	int i, count = blockyard_fio_report(FILE_ENG_DATA(f), from, rows, min(max, 64U));

	for (i = 0; i < count; i++)
		zones[i] = (struct zbd_zone) {
			.start = rows[i].start, .wp = rows[i].wp, .len = rows[i].len,
			.capacity = rows[i].capacity, .type = rows[i].type, .cond = rows[i].cond,
		};
	return told(count);
}

static int reset_wp(struct thread_data *td, struct fio_file *f, uint64_t from, uint64_t len)
{
	return told(blockyard_fio_manage(FILE_ENG_DATA(f), 0, from, len));
}

static int max_open_zones(struct thread_data *td, struct fio_file *f, unsigned int *max)
{
	*max = blockyard_fio_limit(FILE_ENG_DATA(f), 0);
	return 0;
}

#if FIO_IOOPS_VERSION >= 39
static int max_active_zones(struct thread_data *td, struct fio_file *f, unsigned int *max)
{
	*max = blockyard_fio_limit(FILE_ENG_DATA(f), 1);
	return 0;
}

static int finish_zone(struct thread_data *td, struct fio_file *f, uint64_t from, uint64_t len)
{
	return told(blockyard_fio_manage(FILE_ENG_DATA(f), 1, from, len));
}

static int move_zone_wp(struct thread_data *td, struct fio_file *f, struct zbd_zone *zone,
			uint64_t len, const char *buf)
{
	return told(blockyard_fio_write(FILE_ENG_DATA(f), zone->wp, buf, len));
}
#endif

struct ioengine_ops blockyard_fio_table = {
	.name = "blockyard", .version = FIO_IOOPS_VERSION,
	.flags = FIO_RAWIO | FIO_NOEXTEND | FIO_NODISKUTIL | FIO_MEMALIGN | FIO_NO_OFFLOAD,
	.options = options, .option_struct_size = sizeof(struct options),
	.setup = setup, .init = init, .post_init = memory, .cleanup = cleanup,
	.io_u_free = io_u_free, .queue = queue, .commit = commit, .getevents = getevents,
	.event = event, .open_file = open_file, .close_file = nothing, .invalidate = nothing,
	.unlink_file = nothing, .get_file_size = size, .get_zoned_model = zoned_model,
	.report_zones = report_zones, .reset_wp = reset_wp,
	.get_max_open_zones = max_open_zones,
#if FIO_IOOPS_VERSION >= 39
	.get_max_active_zones = max_active_zones, .finish_zone = finish_zone,
	.move_zone_wp = move_zone_wp,
#endif
};

/* At the end of the process the devices go as they would from a yard: traces are written out. */
static void __attribute__((destructor)) leave(void)
{
	blockyard_fio_exit();
}
