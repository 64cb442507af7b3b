// In libFuzzer's place where the compiler has none: runs the files and folders named, then, for -max_total_time=SECONDS,
// simple changes of them. Finds less, since nothing tells it what is new.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "fuzz.hpp"

namespace {

using Input = std::vector<std::uint8_t>;

void run(const Input& input) { LLVMFuzzerTestOneInput(input.data(), input.size()); }

Input read(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

void change(Input& input, std::mt19937_64& random) {
    for (std::uint64_t n = 1 + random() % 4; n > 0; --n) {
        const std::size_t at = random() % (input.size() + 1);
        const auto here = input.begin() + static_cast<std::ptrdiff_t>(at);
        switch (random() % 4) {
            case 0: input.insert(here, static_cast<std::uint8_t>(random())); break;
            case 1: input.erase(here, here + static_cast<std::ptrdiff_t>(std::min(random() % 9, input.size() - at))); break;
            default:
                if (at < input.size()) input[at] = static_cast<std::uint8_t>(random());
        }
    }
}

}  // namespace

int main(int count, char** words) {
    std::vector<Input> corpus;
    long seconds = 0;
    const std::string limit = "-max_total_time=";
    for (int i = 1; i < count; ++i) {
        const std::string word = words[i];
        if (word.rfind(limit, 0) == 0) seconds = std::stol(word.substr(limit.size()));
        if (word.rfind('-', 0) == 0) continue;
        if (std::filesystem::is_directory(word)) {
            for (const auto& entry : std::filesystem::directory_iterator(word)) corpus.push_back(read(entry.path()));
        } else {
            corpus.push_back(read(word));
        }
    }
    corpus.emplace_back();
    for (const Input& input : corpus) run(input);
    std::mt19937_64 random(std::random_device{}());
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    while (std::chrono::steady_clock::now() < end) {
        Input input = corpus[random() % corpus.size()];
        change(input, random);
        // What is running when a sanitizer ends the process; run it again by its name.
        std::ofstream("last-input", std::ios::binary)
            .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
        run(input);
    }
    return 0;
}
