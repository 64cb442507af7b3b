// Writes a trace to a file: as record rows, behind each other, or as OTLP/JSON lines, a span each.
//
//     spans FILE.rows|FILE.jsonl [--records N] [--pages N] ...
#include <cstdio>
#include <string>

#include "options.hpp"
#include "trace.hpp"

namespace kvguard::bench {
namespace {

constexpr const char* kRoles[] = {"prefill", "decode", "unified", "router"};
constexpr const char* kScopes[] = {"tenant", "public"};
constexpr const char* kSides[] = {"send", "recv"};
constexpr const char* kStatuses[] = {"ok", "failed", "aborted"};
constexpr const char* kOutcomes[] = {"finished", "rejected", "aborted", "failed"};

class Line {
  public:
    explicit Line(std::string& out) : out_(out) {}

    void text(const char* key, std::string_view value) {
        begin(key);
        out_.append("\"stringValue\":\"").append(value).append("\"}}");
    }
    void integer(const char* key, std::uint64_t value) {
        begin(key);
        out_.append("\"intValue\":\"").append(std::to_string(value)).append("\"}}");
    }
    void truth(const char* key, bool value) {
        begin(key);
        out_.append("\"boolValue\":").append(value ? "true}}" : "false}}");
    }
    void pages(const char* key, const Pages& pages) {
        std::string list;
        for (std::uint32_t i = 0; i < pages.runs(); ++i) {
            const Pages::Run run = pages.run(i);
            if (i != 0) list += ',';
            list += std::to_string(run.first);
            if (run.pages > 1) list.append("-").append(std::to_string(run.stop() - 1));
        }
        text(key, list);
    }

  private:
    void begin(const char* key) {
        out_.append(first_ ? "{\"key\":\"" : ",{\"key\":\"").append(key).append("\",\"value\":{");
        first_ = false;
    }
    std::string& out_;
    bool first_ = true;
};

// All in one trace: nothing that reads these files looks at that.
void write_line(std::string& out, const Record& r) {
    char head[400];
    std::snprintf(head, sizeof head,
                  "{\"resourceSpans\":[{\"resource\":{\"attributes\":[{\"key\":\"service.name\",\"value\":"
                  "{\"stringValue\":\"engine\"}}]},\"scopeSpans\":[{\"scope\":{\"name\":\"kv\"},\"spans\":[{"
                  "\"traceId\":\"5b8efff798038103d269b633813fc60c\",\"spanId\":\"%016lx\",\"name\":\"%s\","
                  "\"startTimeUnixNano\":\"%lu\",\"endTimeUnixNano\":\"%lu\",\"attributes\":[",
                  r.time_ns | 1, name_of(r.kind), r.time_ns, r.time_ns);
    out += head;
    Line line(out);
    line.text("kv.stream.id", r.stream);
    line.integer("kv.stream.epoch", r.epoch);
    line.integer("kv.seq", r.seq);
    if (!r.request.empty()) line.text("kv.request.id", r.request), line.text("kv.tenant.id", r.tenant);
    if (!r.pool.empty()) line.text("kv.pool.id", r.pool);
    if (r.has_pages()) line.pages("kv.pages", r.pages);
    switch (r.kind) {
        case KVG_POOL:
            line.integer("kv.pool.pages", r.tokens);
            line.integer("kv.page.tokens", r.extra);
            line.integer("kv.page.bytes", r.page_bytes);
            line.text("kv.role", kRoles[r.code]);
            line.integer("kv.context.limit", r.context_limit);
            break;
        case KVG_ADMIT:
            line.integer("kv.tokens", r.tokens);
            if (r.flags & KVG_HAS_MAX) line.integer("kv.max_tokens", r.extra);
            break;
        case KVG_SHARE:
            if (r.flags & KVG_HAS_TOKENS) line.integer("kv.tokens", r.tokens);
            break;
        case KVG_WRITE:
            line.integer("kv.tokens", r.tokens);
            if (r.code != KVG_TENANT) line.text("kv.scope", kScopes[r.code]);
            break;
        case KVG_TRANSFER_BEGIN:
            line.text("kv.transfer.id", r.transfer);
            line.text("kv.peer.pool.id", r.peer_pool);
            line.pages("kv.peer.pages", r.peer_pages);
            line.integer("kv.tokens", r.tokens);
            break;
        case KVG_TRANSFER_END:
            line.text("kv.transfer.id", r.transfer);
            line.text("kv.side", kSides[r.code]);
            line.integer("kv.tokens", r.tokens);
            line.text("kv.status", kStatuses[r.status]);
            break;
        case KVG_READ: line.integer("kv.tokens", r.tokens); break;
        case KVG_REQUEST_END: line.text("kv.outcome", kOutcomes[r.code]); break;
        case KVG_RESPOND:
            line.integer("http.response.status_code", r.extra);
            line.integer("kv.tokens", r.tokens);
            line.truth("kv.final", (r.flags & KVG_FINAL) != 0);
            break;
        default: break;
    }
    if (r.flags & KVG_HAS_DIGESTS) line.text("kv.digests", r.digests);
    out += "]}]}]}]}\n";
}

int run(const std::string& path, const Options& options) {
    constexpr std::uint64_t kChunk = 16'384;
    const bool lines = path.size() > 6 && path.substr(path.size() - 6) == ".jsonl";
    std::FILE* file = std::fopen(path.c_str(), "wb");
    if (file == nullptr) {
        std::perror(path.c_str());
        return 2;
    }
    const std::uint64_t records = options.number("records", 100'000);
    Trace trace(shape_of(options));
    Rows rows;
    std::string text;
    std::uint64_t written = 0;
    while (written < records) {
        rows.bytes.clear();
        rows.count = 0;
        trace.fill(rows, std::min(kChunk, records - written));
        if (!lines) {
            written += rows.count;
            std::fwrite(rows.bytes.data(), 1, rows.bytes.size(), file);
            continue;
        }
        text.clear();
        Record record;
        for (std::size_t at = 0; at < rows.bytes.size(); at += padded(record.bytes.size())) {
            if (const char* wrong = parse(rows.bytes.data() + at, rows.bytes.size() - at, record); wrong != nullptr) {
                std::fprintf(stderr, "a record that is none: %s\n", wrong);
                return 1;
            }
            write_line(text, record);
            ++written;
        }
        std::fwrite(text.data(), 1, text.size(), file);
    }
    if (std::fclose(file) != 0) {
        std::perror(path.c_str());
        return 2;
    }
    std::printf("{\"records\":%lu,\"requests\":%lu,\"aborted\":%lu,\"held_up\":%lu}\n", written, trace.mix().requests,
                trace.mix().aborted, trace.mix().held_up);
    return 0;
}

}  // namespace
}  // namespace kvguard::bench

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "spans FILE.rows|FILE.jsonl [--records N] [--pages N] ...\n");
        return 2;
    }
    return kvguard::bench::run(argv[1], kvguard::bench::Options(argc - 1, argv + 1));
}
