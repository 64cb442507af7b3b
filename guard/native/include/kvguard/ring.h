/* The ring, version 1: shared memory through which processes hand records (record.h) to the guard beside them.
 *
 * One file, by default /dev/shm/kvguard/ring, mode 0600: a header, then lanes. A lane is a queue of 64-byte rows with
 * one writer; many writers are many lanes. One process, the guard, reads them all. Numbers are in the machine's byte
 * order.
 *
 *   offset  bytes  header (4096 bytes)
 *   0       8      magic, the characters KVGRING1
 *   8       4      version, KVG_RING_VERSION
 *   12      4      lanes L, 1 to KVG_RING_MAX_LANES
 *   16      4      rows a lane R, a power of two, KVG_RING_MIN_ROWS to KVG_RING_MAX_ROWS
 *   20      4      bytes a row, 64
 *   24      8      bytes of the file, 4096 + L * (4096 + 64 * R)
 *   32      8      created: ns since the Unix epoch
 *   40      8      process id of the newest reader, in its own namespace
 *   64      4      doorbell: a futex word, counted up by a writer that wakes the reader
 *   128     4      1 while the reader sleeps, or is about to, and wants the doorbell rung
 *
 * From 4096 on, each lane has 4096 bytes of its own and R rows:
 *
 *   offset  bytes  lane
 *   0       4      process id of the writer, in its own namespace; 0 when it left in order
 *   4       4      bytes of the stream id
 *   8       8      taken by this writer: ns since the Unix epoch
 *   64      8      head: rows written since the file was made (writer)
 *   72      8      records written (writer)
 *   80      8      records that found the lane full (writer)
 *   128     8      tail: rows taken since the file was made (reader)
 *   136     8      records taken (reader)
 *   144     8      bytes that were no record and were skipped (reader)
 *   1024    1024   stream id of the writer, UTF-8
 *   4096    64 R   the rows; row n is at n modulo R
 *
 * A record stands in whole rows, one after the other (the last row of a lane is followed by its first), zeros behind
 * it. Rows tail to head are the reader's, all others the writer's. A record becomes visible, as a whole, by the store
 * of head: a writer that dies before it leaves nothing behind. A writer never waits: a record that finds no room is
 * counted and lost, and its kv.seq stays a hole in the stream.
 *
 * Who has a lane is said by a lock (an open file description lock, F_OFD_SETLK) on the first byte of the lane in the
 * file, which the kernel lifts when the process dies, whatever it dies of. A lane without the lock is free, rows that
 * wait in it notwithstanding: the next writer goes on at head. Locks hold across the namespaces of containers, where
 * process ids do not. The reader's lock is on the first byte of the file.
 *
 * The file is made complete under another name and then linked to its path, so nobody ever sees half of it. Its
 * memory is reserved at that time: a full /dev/shm fails there and not, with SIGBUS, in an engine's write.
 *
 * Whoever may write the file can spoil what is in it, so the reader trusts nothing: it copies a record out and then
 * looks at the copy; a head that cannot be is answered by skipping to it.
 *
 * Include this before other headers, or define _GNU_SOURCE. All functions are for one thread at a time. A writer's
 * file descriptor is closed on exec, but a child made by fork alone shares lock and lane: it must neither write nor
 * outlive its parent for long, or call kvg_ring_leave_to_parent.
 */
#ifndef KVGUARD_RING_H
#define KVGUARD_RING_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "record.h"

#define KVG_RING_PATH "/dev/shm/kvguard/ring"
#define KVG_RING_MAGIC "KVGRING1"
#define KVG_RING_VERSION 1u
#define KVG_RING_HEADER_BYTES 4096u
#define KVG_RING_LANES 16u /* unless said otherwise */
#define KVG_RING_ROWS 32768u
#define KVG_RING_MAX_LANES 1024u
#define KVG_RING_MIN_ROWS 64u
#define KVG_RING_MAX_ROWS (1u << 24)

#ifndef F_OFD_SETLK
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

struct kvg_ring_header {
    char magic[8];
    uint32_t version;
    uint32_t lanes;
    uint32_t rows;
    uint32_t row_bytes;
    uint64_t bytes;
    uint64_t created_ns;
    uint64_t reader_pid;
    char space0[16];
    uint32_t doorbell;
    char space1[60];
    uint32_t sleeps;
    char space2[3964];
};

struct kvg_lane {
    int32_t pid;
    uint32_t stream_bytes;
    uint64_t taken_ns;
    char space0[48];
    uint64_t head;
    uint64_t written;
    uint64_t dropped;
    char space1[40];
    uint64_t tail;
    uint64_t taken;
    uint64_t broken;
    char space2[872];
    char stream[KVG_MAX_ID_BYTES];
    char space3[2048];
};

typedef char kvg_ring_header_is_4096_bytes[sizeof(struct kvg_ring_header) == KVG_RING_HEADER_BYTES ? 1 : -1];
typedef char kvg_lane_is_4096_bytes[sizeof(struct kvg_lane) == KVG_RING_HEADER_BYTES ? 1 : -1];

/* A ring mapped. What the file says of its size was looked at once and is kept here. */
struct kvg_ring {
    struct kvg_ring_header *header;
    uint64_t bytes;
    uint32_t lanes;
    uint32_t rows;
    int fd;
};

/* A lane taken. Its numbers are the writer's own: what the file says of them is only told to others. */
struct kvg_ring_writer {
    struct kvg_ring ring;
    struct kvg_lane *lane;
    uint64_t head;
    uint64_t tail; /* as last seen */
    uint64_t written;
    uint64_t dropped;
};

static inline uint64_t kvg_lane_offset(uint32_t rows, uint32_t lane) {
    return KVG_RING_HEADER_BYTES + lane * (KVG_RING_HEADER_BYTES + (uint64_t)rows * KVG_ROW_BYTES);
}

static inline struct kvg_lane *kvg_ring_lane(const struct kvg_ring *ring, uint32_t lane) {
    return (struct kvg_lane *)((char *)ring->header + kvg_lane_offset(ring->rows, lane));
}

static inline char *kvg_lane_rows(struct kvg_lane *lane) { return (char *)lane + KVG_RING_HEADER_BYTES; }

static inline uint64_t kvg_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Locks a byte of the file for this open file description; -1 and errno when another holds it. */
static inline int kvg_ring_lock(int fd, uint64_t at) {
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = (off_t)at;
    lock.l_len = 1;
    return fcntl(fd, F_OFD_SETLK, &lock);
}

/* Whether another open file description holds the lock on a byte. */
static inline int kvg_ring_locked(int fd, uint64_t at) {
    struct flock lock;
    memset(&lock, 0, sizeof lock);
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = (off_t)at;
    lock.l_len = 1;
    return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

static inline int kvg_ring_rows_fit(uint32_t lanes, uint32_t rows) {
    return lanes >= 1 && lanes <= KVG_RING_MAX_LANES && rows >= KVG_RING_MIN_ROWS && rows <= KVG_RING_MAX_ROWS &&
           (rows & (rows - 1)) == 0;
}

/* Makes the file, unless somebody else does so first. Returns 0, or -1 and errno. */
static inline int kvg_ring_make(const char *path, uint32_t lanes, uint32_t rows) {
    char fresh[PATH_MAX];
    char directory[PATH_MAX];
    if (snprintf(fresh, sizeof fresh, "%s.%ld.%llx", path, (long)getpid(), (unsigned long long)kvg_now_ns()) >=
        (int)sizeof fresh) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(directory, fresh, sizeof directory);
    char *const slash = strrchr(directory, '/');
    if (slash != NULL && slash != directory) {
        *slash = 0;
        if (mkdir(directory, 0755) != 0 && errno != EEXIST) return -1;
    }
    const int fd = open(fresh, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0) return -1;
    struct kvg_ring_header header;
    memset(&header, 0, sizeof header);
    memcpy(header.magic, KVG_RING_MAGIC, sizeof header.magic);
    header.version = KVG_RING_VERSION;
    header.lanes = lanes;
    header.rows = rows;
    header.row_bytes = KVG_ROW_BYTES;
    header.bytes = kvg_lane_offset(rows, lanes);
    header.created_ns = kvg_now_ns();
    int wrong = posix_fallocate(fd, 0, (off_t)header.bytes);
    if (wrong == 0 && pwrite(fd, &header, sizeof header, 0) != (ssize_t)sizeof header) wrong = errno ? errno : EIO;
    if (wrong == 0 && link(fresh, path) != 0 && errno != EEXIST) wrong = errno;
    unlink(fresh);
    close(fd);
    errno = wrong;
    return wrong == 0 ? 0 : -1;
}

/* Maps the ring at `path`, which is made with `lanes` and `rows` if there is none; one that is there keeps its own.
 * Returns NULL, or what is wrong; errno then says why, or is 0. */
static inline const char *kvg_ring_map(struct kvg_ring *ring, const char *path, uint32_t lanes, uint32_t rows) {
    memset(ring, 0, sizeof *ring);
    ring->fd = -1;
    errno = 0;
    if (!kvg_ring_rows_fit(lanes, rows)) return "needs 1 to 1024 lanes and 64 to 2**24 rows, a power of two";
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 && errno == ENOENT) {
        if (kvg_ring_make(path, lanes, rows) != 0) return "cannot be made (is there room for its memory?)";
        fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    }
    if (fd < 0) return "cannot be opened (run engine and guard as the same user)";
    struct stat info;
    struct kvg_ring_header header;
    const char *wrong = NULL;
    errno = 0;
    if (fstat(fd, &info) != 0) {
        wrong = "cannot be looked at";
    } else if (!S_ISREG(info.st_mode)) {
        wrong = "is not a regular file";
    } else if ((info.st_mode & 077) != 0) {
        wrong = "is open to others than its owner: its mode must be 0600";
    } else if (info.st_uid != geteuid() && geteuid() != 0) {
        wrong = "is another user's";
    } else if (pread(fd, &header, sizeof header, 0) != (ssize_t)sizeof header ||
               memcmp(header.magic, KVG_RING_MAGIC, sizeof header.magic) != 0) {
        errno = 0;
        wrong = "is no ring";
    } else if (header.version != KVG_RING_VERSION) {
        wrong = "is of another version: run the same release in engine and guard, and remove the file while none runs";
    } else if (header.row_bytes != KVG_ROW_BYTES || !kvg_ring_rows_fit(header.lanes, header.rows) ||
               header.bytes != kvg_lane_offset(header.rows, header.lanes) ||
               (uint64_t)info.st_size != header.bytes) {
        wrong = "is not of the size that it says: remove the file while neither engine nor guard runs";
    } else {
        void *const base = mmap(NULL, header.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (base == MAP_FAILED) {
            wrong = "cannot be mapped";
        } else {
            ring->header = (struct kvg_ring_header *)base;
            ring->bytes = header.bytes;
            ring->lanes = header.lanes;
            ring->rows = header.rows;
            ring->fd = fd;
            return NULL;
        }
    }
    const int why = errno;
    close(fd);
    errno = why;
    return wrong;
}

static inline void kvg_ring_unmap(struct kvg_ring *ring) {
    if (ring->header != NULL) munmap(ring->header, ring->bytes);
    if (ring->fd >= 0) close(ring->fd);
    ring->header = NULL;
    ring->fd = -1;
}

/* Takes a free lane of the ring at `path`. Returns NULL, or what is wrong; errno then says why, or is 0. */
static inline const char *kvg_ring_enter(struct kvg_ring_writer *writer, const char *path, uint32_t lanes,
                                         uint32_t rows, const char *stream, size_t stream_bytes) {
    memset(writer, 0, sizeof *writer);
    writer->ring.fd = -1;
    errno = 0;
    if (stream_bytes < 1 || stream_bytes > KVG_MAX_ID_BYTES) return "needs a stream id of 1 to 1024 bytes";
    const char *const wrong = kvg_ring_map(&writer->ring, path, lanes, rows);
    if (wrong != NULL) return wrong;
    for (uint32_t i = 0; i < writer->ring.lanes; ++i) {
        if (kvg_ring_lock(writer->ring.fd, kvg_lane_offset(writer->ring.rows, i)) != 0) {
            if (errno == EAGAIN || errno == EACCES) continue;
            const int why = errno;
            kvg_ring_unmap(&writer->ring);
            errno = why;
            return "cannot be locked";
        }
        struct kvg_lane *const lane = kvg_ring_lane(&writer->ring, i);
        writer->lane = lane;
        writer->head = __atomic_load_n(&lane->head, __ATOMIC_ACQUIRE);
        writer->tail = __atomic_load_n(&lane->tail, __ATOMIC_ACQUIRE);
        if (writer->head - writer->tail > writer->ring.rows) {
            /* Somebody spoilt it. */
            writer->head = writer->tail;
            __atomic_store_n(&lane->head, writer->head, __ATOMIC_RELEASE);
        }
        memcpy(lane->stream, stream, stream_bytes);
        lane->stream_bytes = (uint32_t)stream_bytes;
        lane->taken_ns = kvg_now_ns();
        lane->pid = (int32_t)getpid();
        return NULL;
    }
    kvg_ring_unmap(&writer->ring);
    errno = 0;
    return "has no free lane: stop a writer, or make the ring anew with more lanes";
}

/* Gives the lane back; what waits in it is still read. */
static inline void kvg_ring_leave(struct kvg_ring_writer *writer) {
    if (writer->lane != NULL) writer->lane->pid = 0;
    writer->lane = NULL;
    kvg_ring_unmap(&writer->ring);
}

/* In a child made by fork: lets go of the lane, which stays the parent's. */
static inline void kvg_ring_leave_to_parent(struct kvg_ring_writer *writer) {
    writer->lane = NULL;
    kvg_ring_unmap(&writer->ring);
}

/* Wakes the reader if it sleeps, after something was made visible to it. */
static inline void kvg_ring_knock(struct kvg_ring_header *header) {
    /* Either the reader sees what was written before it sleeps, or this sees that it sleeps. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&header->sleeps, __ATOMIC_RELAXED) == 0) return;
    if (__atomic_exchange_n(&header->sleeps, 0, __ATOMIC_SEQ_CST) == 0) return;
    __atomic_fetch_add(&header->doorbell, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &header->doorbell, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* Writes a record of record.h. Returns 1, or 0 when it has no room: then it is lost, and counted. Never waits. */
static inline int kvg_ring_put(struct kvg_ring_writer *writer, const void *record, uint32_t bytes) {
    struct kvg_lane *const lane = writer->lane;
    const uint64_t rows = writer->ring.rows;
    const uint64_t need = ((uint64_t)bytes + KVG_ROW_BYTES - 1) / KVG_ROW_BYTES;
    if (writer->head - writer->tail + need > rows) {
        const uint64_t tail = __atomic_load_n(&lane->tail, __ATOMIC_ACQUIRE);
        if (writer->head - tail <= rows)
            writer->tail = tail;
        else
            __atomic_store_n(&lane->head, writer->head, __ATOMIC_RELEASE); /* both are spoilt until this is seen */
        if (writer->head - writer->tail + need > rows) {
            __atomic_store_n(&lane->dropped, ++writer->dropped, __ATOMIC_RELAXED);
            return 0;
        }
    }
    char *const base = kvg_lane_rows(lane);
    const uint64_t at = (writer->head & (rows - 1)) * KVG_ROW_BYTES;
    const uint64_t straight = rows * KVG_ROW_BYTES - at;
    const uint64_t padding = need * KVG_ROW_BYTES - bytes;
    if (bytes <= straight) {
        memcpy(base + at, record, bytes);
        memset(base + at + bytes, 0, padding);
    } else {
        memcpy(base + at, record, straight);
        memcpy(base, (const char *)record + straight, bytes - straight);
        memset(base + (bytes - straight), 0, padding);
    }
    writer->head += need;
    __atomic_store_n(&lane->written, ++writer->written, __ATOMIC_RELAXED);
    __atomic_store_n(&lane->head, writer->head, __ATOMIC_RELEASE);
    kvg_ring_knock(writer->ring.header);
    return 1;
}

#endif
