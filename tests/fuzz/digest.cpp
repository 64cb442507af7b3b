// The page hash, of any pieces: every way to compute NH gives the same, reads nothing that is not the piece's, and
// hashing pieces apart and merging them comes to what hashing them behind each other does.
#include "digest.hpp"

#include <memory>
#include <string>

#include "fuzz.hpp"

using namespace kvguard;

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    fuzz::Draw draw(data, size);
    unsigned char material[KVG_HASH_KEY_BYTES];
    std::uint64_t state = draw.word();
    for (unsigned char& byte : material) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        byte = draw.one_in(64) ? 0xff : static_cast<unsigned char>(state >> 56);
    }
    const std::size_t copies = 1 + draw.below(40), cut = draw.word(), offset = draw.below(64);
    const std::string_view rest = draw.rest();
    std::string bytes;
    for (std::size_t i = 0; i < copies; ++i) bytes += rest;
    // At any address, and with nothing behind it: AddressSanitizer sees what is read too much.
    const auto memory = std::make_unique<unsigned char[]>(offset + bytes.size());
    unsigned char* const page = memory.get() + offset;
    if (!bytes.empty()) std::memcpy(page, bytes.data(), bytes.size());
    const std::size_t first = bytes.empty() ? 0 : cut % (bytes.size() + 1), second = bytes.size() - first;

    const HashKey plain(material, nh_ways().back());
    const Hash whole = plain.add(plain.add(kNoBlocks, page, first), page + first, second);
    for (const std::uint64_t lane : whole) MUST(lane < KVG_DIGEST_PRIME);
    for (const Nh& way : nh_ways()) {
        if (!way.runs()) continue;
        const HashKey key(material, way);
        const Hash left = key.add(kNoBlocks, page, first), right = key.add(kNoBlocks, page + first, second);
        MUST(key.add(left, page + first, second) == whole);
        MUST(key.merge(left, right, (second + kBlockBytes - 1) / kBlockBytes) == whole);
    }
    return 0;
}
