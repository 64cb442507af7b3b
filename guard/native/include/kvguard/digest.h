/* The page digest, version 1: the one place that says what it is.
 *
 * Both sides of a transfer compute a digest of each page and the guard compares the two. It has two parts: a keyed
 * hash of the page's bytes, at memory speed, which never leaves the process, and a seal over hash and circumstances,
 * which does. The hash is computed alike, bit for bit, by guard.native (digest_nh.cpp), engine/kernels/digest.py
 * (torch) and engine/kernels/digest_triton.py (Triton); keys and seals are hooks/digest.py's.
 *
 * Bytes. Numbers are little endian. A page is a row of pieces, as many bytes each, as a rule its layers in order:
 * where they lie does not matter, so a page in one run and one scattered over a pool a layer have the same hash. A
 * piece is cut into blocks of KVG_DIGEST_BLOCK_BYTES; zeros fill its last one up. An empty piece has no block.
 *
 * Level 1, NH. A block is 1024 words of 32 bits, m[0] to m[1023], and n is how many of its bytes are the piece's.
 * With H = 512, the key table k[0] to k[3 H - 1], sums k + m modulo 2^32, and all else modulo 2^64,
 *
 *   lane 0:  v = n + sum over i < H of (m[i] + k[i])     * (m[H + i] + k[H + i])
 *   lane 1:  v = n + sum over i < H of (m[i] + k[H + i]) * (m[H + i] + k[2 H + i])
 *
 * Level 2, a polynomial. Modulo p = 2^61 - 1, with the lane's point r and a start at h = 1, each block in turn, those
 * of the first piece first, makes
 *
 *   h = (h * r + v / 2^32) * r + v mod 2^32
 *
 * The hash is h of lane 0 and h of lane 1, each below p, as two 64-bit words: KVG_HASH_BYTES. That of no block at all
 * is (1, 1). Hashes merge: with hashes A and B of two rows of pieces, and n blocks in the second, that of both rows
 * behind each other is, in each lane, (A - 1) * r^(2 n) + B. So layers may be hashed apart, at the same time, and
 * wherever they are.
 *
 * Keys. HKDF-SHA256 (RFC 5869) turns the configured secret into those of a tenant: extract with the salt "kvguard page
 * digest 1", expand with the info "tenant", a zero byte and the tenant's id in UTF-8, to KVG_TENANT_KEY_BYTES:
 *
 *   offset  bytes  what
 *   0       6144   k, 1536 words
 *   6144    16     x0; the point of lane 0 is r = 1 + x0 mod (p - 1)
 *   6160    16     x1, likewise for lane 1
 *   6176    32     the sealing key
 *
 * Seal. Decode draws a nonce of KVG_NONCE_BYTES for every transfer and tells prefill, so that both sides seal alike:
 *
 *   transfer key = HMAC-SHA256(sealing key, nonce | request's id in UTF-8)
 *   digest       = BLAKE2b, keyed with the transfer key, 16 bytes long, of
 *                  place | generation | piece bytes | pieces | hash
 *
 * place: which page of the request it is, from 0. generation: that of the destination page. The first four are 8
 * bytes each. Keyed BLAKE2b (RFC 7693) because it costs a third of an HMAC, once a page. Whoever does not hold the
 * secret sees random bytes: nobody has to open a seal, both sides only compare, so a pseudorandom function takes the
 * place of a cipher, and a hash under one nonce twice (what was sent, what arrived) gives nothing away either. Tenant,
 * request, place, generation, length and pieces are bound here, and once more the length in level 1: an all-zero page,
 * too, has another digest each time.
 *
 * Strength. For two unlike blocks and any difference, either lane of NH agrees with a probability of 2^-32 at most,
 * both with 2^-64 (Black et al., UMAC, 1999; the lanes share the table, shifted by H: each pair has three keys of its
 * own, so their proof holds word for word). 64 bits enter the polynomial as two coefficients below 2^32 and nothing is
 * lost to the modulus; unlike polynomials of n blocks agree in a lane with 2 n / 2^61 at most. So unlike pages have
 * like hashes with a probability of about 2^-64, whoever chose them, as long as hashes stay secret; like digests, with
 * that and 2^-128.
 */
#ifndef KVGUARD_DIGEST_H
#define KVGUARD_DIGEST_H

#include <stdint.h>

#define KVG_DIGEST_BLOCK_BYTES 4096u
#define KVG_DIGEST_HALF_WORDS 512u /* H */
#define KVG_DIGEST_LANES 2u
#define KVG_DIGEST_PRIME ((1ull << 61) - 1)
#define KVG_TENANT_KEY_BYTES 6208u
#define KVG_HASH_KEY_BYTES 6176u /* of them, what the hash needs */
#define KVG_HASH_BYTES 16u
#define KVG_NONCE_BYTES 16u

#endif
