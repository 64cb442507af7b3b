/* The binary record, version 1: what a `kv.*` span says, as bytes.
 *
 * The same bytes travel in the shared-memory ring (ring.h), go from the OTLP decoder to the ledger, stand in the
 * journal and are kept as evidence. They are in the machine's own byte order, never leave the machine, and are
 * canonical: equal records have equal bytes. Plain C, so that a hook agent can write them.
 *
 * A record is a header of 64 bytes and a tail. In the ring it fills whole 64-byte rows: the header's row and as
 * many continuation rows as the tail needs, zeros behind.
 *
 *   offset  bytes  header
 *   0       4      bytes: header and tail together, without padding to whole rows; at most KVG_MAX_RECORD_BYTES
 *   4       1      version, KVG_RECORD_VERSION
 *   5       1      kind, enum kvg_kind
 *   6       2      flags, KVG_HAS_*, KVG_FINAL
 *   8       8      time: ns since the Unix epoch, below 2^63
 *   16      8      kv.stream.epoch, below 2^63
 *   24      8      kv.seq, below 2^63
 *   32      8      kv.tokens; kv.pool.pages of a kv.pool
 *   40      8      kv.max_tokens of a kv.admit, kv.page.tokens of a kv.pool, the status code of a kv.respond
 *   48      2 x 7  bytes of each string of the tail: stream, request, tenant, pool, transfer, peer pool, share from
 *   62      1      code: kvg_role of a kv.pool, kvg_scope of a kv.write, kvg_side of a kv.transfer.end, kvg_outcome
 *                  of a kv.request.end; 0 for other kinds
 *   63      1      kvg_status of a kv.transfer.end; 0 for other kinds
 *
 *   tail
 *   the strings in that order, UTF-8, nothing between them; an absent one has no bytes; zeros up to a multiple of 8
 *   kv.pool: 8 bytes kv.page.bytes, 8 bytes kv.context.limit
 *   kinds that name pages: four 4-byte words: number of runs of kv.pages, of kv.peer.pages, bytes of the digests'
 *   text, number of digests; then the runs, 8 bytes each (first page << 24 | pages - 1), neighbours joined; then
 *   the digests' text as in kv.digests (comma-separated lower-case hexadecimal)
 */
#ifndef KVGUARD_RECORD_H
#define KVGUARD_RECORD_H

#include <stdint.h>

#define KVG_RECORD_VERSION 1u
#define KVG_ROW_BYTES 64u
#define KVG_MAX_ID_BYTES 1024u                /* 256 characters of UTF-8 */
#define KVG_MAX_PAGE_INDEX (1ull << 40)
#define KVG_MAX_PAGES (1u << 24)              /* in one record */
#define KVG_MAX_RECORD_BYTES (64u << 20)

enum kvg_kind {
    KVG_PLACE = 0, /* only takes its place in the stream: a record that could not be read */
    KVG_POOL = 1,
    KVG_ADMIT = 2,
    KVG_ALLOC = 3,
    KVG_SHARE = 4,
    KVG_WRITE = 5,
    KVG_TRANSFER_BEGIN = 6,
    KVG_TRANSFER_END = 7,
    KVG_READ = 8,
    KVG_FREE = 9,
    KVG_CACHE = 10,
    KVG_SCRUB = 11,
    KVG_REQUEST_END = 12,
    KVG_RESPOND = 13,
    KVG_REFUSE = 14,
    KVG_KINDS = 15
};

enum kvg_role { KVG_PREFILL = 0, KVG_DECODE = 1, KVG_UNIFIED = 2, KVG_ROUTER = 3 };
enum kvg_scope { KVG_TENANT = 0, KVG_PUBLIC = 1 };
enum kvg_side { KVG_SEND = 0, KVG_RECV = 1 };
enum kvg_status { KVG_OK = 0, KVG_STATUS_FAILED = 1, KVG_STATUS_ABORTED = 2 };
enum kvg_outcome { KVG_FINISHED = 0, KVG_REJECTED = 1, KVG_ABORTED = 2, KVG_FAILED = 3 };

#define KVG_HAS_TOKENS 1u  /* kv.tokens was given, where it is optional: kv.share */
#define KVG_HAS_MAX 2u     /* kv.max_tokens was given */
#define KVG_HAS_DIGESTS 4u /* kv.digests was given (it may be empty) */
#define KVG_FINAL 8u       /* kv.final is true */

struct kvg_record {
    uint32_t bytes;
    uint8_t version;
    uint8_t kind;
    uint16_t flags;
    uint64_t time_ns;
    uint64_t epoch;
    uint64_t seq;
    uint64_t tokens;
    uint64_t extra;
    uint16_t stream_bytes;
    uint16_t request_bytes;
    uint16_t tenant_bytes;
    uint16_t pool_bytes;
    uint16_t transfer_bytes;
    uint16_t peer_pool_bytes;
    uint16_t share_from_bytes;
    uint8_t code;
    uint8_t status;
};

static inline uint64_t kvg_run(uint64_t first, uint64_t pages) { return first << 24 | (pages - 1); }
static inline uint64_t kvg_run_first(uint64_t run) { return run >> 24; }
static inline uint64_t kvg_run_pages(uint64_t run) { return (run & 0xffffff) + 1; }

#endif
