// `--name value` on the command line, and the options that shape a trace.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "trace.hpp"

namespace kvguard::bench {

class Options {
  public:
    Options(int argc, char** argv) : argc_(argc), argv_(argv) {}

    std::string text(std::string_view name, const char* otherwise) const {
        for (int i = 1; i + 1 < argc_; i += 2)
            if (std::string_view(argv_[i]).substr(0, 2) == "--" && std::string_view(argv_[i]).substr(2) == name)
                return argv_[i + 1];
        return otherwise;
    }
    std::uint64_t number(std::string_view name, std::uint64_t otherwise) const {
        const std::string given = text(name, "");
        return given.empty() ? otherwise : std::strtoull(given.c_str(), nullptr, 10);
    }

  private:
    int argc_;
    char** argv_;
};

inline Shape shape_of(const Options& options) {
    Shape shape;
    shape.pages = options.number("pages", shape.pages);
    shape.tenants = static_cast<std::uint32_t>(options.number("tenants", shape.tenants));
    shape.live = static_cast<std::uint32_t>(options.number("live", shape.live));
    shape.workers = static_cast<std::uint32_t>(options.number("workers", shape.workers));
    shape.prompt_pages = static_cast<std::uint32_t>(options.number("prompt-pages", shape.prompt_pages));
    shape.step_ns = options.number("step-ns", shape.step_ns);
    shape.held_up_one_in = static_cast<std::uint32_t>(options.number("held-up-one-in", shape.held_up_one_in));
    shape.seed = options.number("seed", shape.seed);
    const std::string policy = options.text("policy", "fifo");
    if (policy != "lifo" && policy != "fifo" && policy != "shuffled") {
        std::fprintf(stderr, "--policy %s: is not lifo, fifo or shuffled\n", policy.c_str());
        std::exit(2);
    }
    shape.policy = policy == "lifo" ? HandOut::lifo : policy == "fifo" ? HandOut::fifo : HandOut::shuffled;
    return shape;
}

}  // namespace kvguard::bench
