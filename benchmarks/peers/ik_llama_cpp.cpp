// Measures ik_llama.cpp: `ik_llama_cpp MODEL THREADS`. run_ik_llama_cpp.py compiles and runs it.
//
// Standard input has for each case the tokens to generate after the first, the number of prompts, and for each prompt
// its length and its token ids. Standard output has the seconds of loading on a line, then the time of the steady clock
// at which all cases have run once, then for each case a line of pairs: the index of the prompt and the seconds since
// the start of each new token. A step is one llama_decode and the argmax of its logits, as in run_llama_cpp.py.
#include <llama.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int kPromptRows = 2048;  // tokens in one llama_decode of a prefill

struct Case {
  int new_tokens;
  std::vector<std::vector<llama_token>> prompts;
};

struct Row {
  int sequence, position;
  llama_token token;
  bool needs_logits;
};

using NextTokens = std::vector<std::pair<int, llama_token>>;  // sequence and token
using Events = std::vector<std::pair<int, double>>;           // prompt and seconds

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void require(bool succeeded, const char* call) {
  if (succeeded) return;
  std::cerr << call << " failed\n";
  std::exit(1);
}

// A context for `sequences` sequences of up to `tokens` tokens each.
class Context {
 public:
  Context(llama_model* model, int sequences, int tokens, int threads)
      : vocab_(llama_n_vocab(model)), batch_(llama_batch_init(kPromptRows, 0, 1)) {
    llama_context_params parameters = llama_context_default_params();
    parameters.n_seq_max = sequences;
    parameters.n_ctx = sequences * ((tokens + 255) / 256 * 256);
    parameters.n_batch = parameters.n_ubatch = kPromptRows;
    parameters.n_threads = parameters.n_threads_batch = threads;
    context_ = llama_init_from_model(model, parameters);
    require(context_ != nullptr, "llama_init_from_model");
  }
  ~Context() {
    llama_batch_free(batch_);
    llama_free(context_);
  }

  // Runs one step and returns the next token of each sequence that has a row with needs_logits.
  NextTokens decode(const Row* rows, int count) {
    batch_.n_tokens = count;
    for (int i = 0; i < count; ++i) {
      batch_.token[i] = rows[i].token;
      batch_.pos[i] = rows[i].position;
      batch_.n_seq_id[i] = 1;
      batch_.seq_id[i][0] = rows[i].sequence;
      batch_.logits[i] = rows[i].needs_logits;
    }
    require(llama_decode(context_, batch_) == 0, "llama_decode");
    NextTokens next;
    for (int i = 0; i < count; ++i) {
      if (!rows[i].needs_logits) continue;
      const float* const logits = llama_get_logits_ith(context_, i);
      next.emplace_back(rows[i].sequence, std::max_element(logits, logits + vocab_) - logits);
    }
    return next;
  }

 private:
  int vocab_;
  llama_batch batch_;
  llama_context* context_;
};

Events run(llama_model* model, const Case& made, int new_tokens, int threads) {
  size_t longest = 0;
  std::vector<Row> rows;
  for (size_t sequence = 0; sequence < made.prompts.size(); ++sequence) {
    const auto& prompt = made.prompts[sequence];
    longest = std::max(longest, prompt.size());
    for (size_t i = 0; i < prompt.size(); ++i) {
      rows.push_back({static_cast<int>(sequence), static_cast<int>(i), prompt[i], i + 1 == prompt.size()});
    }
  }
  Context context(model, static_cast<int>(made.prompts.size()), static_cast<int>(longest) + new_tokens + 1, threads);
  Events events;
  NextTokens next;
  const double start = now();
  const auto note = [&](const NextTokens& tokens) {
    const double seconds = now() - start;
    for (const auto& [sequence, token] : tokens) events.emplace_back(sequence, seconds);
  };
  for (size_t first = 0; first < rows.size(); first += kPromptRows) {
    const size_t count = std::min<size_t>(kPromptRows, rows.size() - first);
    const NextTokens tokens = context.decode(&rows[first], static_cast<int>(count));
    note(tokens);
    next.insert(next.end(), tokens.begin(), tokens.end());
  }
  for (int step = 0; step < new_tokens; ++step) {
    rows.clear();
    for (const auto& [sequence, token] : next) {
      rows.push_back({sequence, static_cast<int>(made.prompts[sequence].size()) + step, token, true});
    }
    next = context.decode(rows.data(), static_cast<int>(rows.size()));
    note(next);
  }
  return events;
}

}  // namespace

int main(int, char** argv) {
  const int threads = std::atoi(argv[2]);
  std::vector<Case> cases;
  size_t prompts, tokens;
  for (int new_tokens; std::cin >> new_tokens >> prompts;) {
    Case made{new_tokens, std::vector<std::vector<llama_token>>(prompts)};
    for (auto& prompt : made.prompts) {
      std::cin >> tokens;
      prompt.resize(tokens);
      for (llama_token& token : prompt) std::cin >> token;
    }
    cases.push_back(std::move(made));
  }
  const double start = now();
  llama_backend_init();
  llama_model_params parameters = llama_model_default_params();
  parameters.repack_tensors = true;  // its interleaved layouts, which are its fastest (-rtr)
  llama_model* const model = llama_model_load_from_file(argv[1], parameters);
  require(model != nullptr, "llama_model_load_from_file");
  std::printf("%.9f\n", now() - start);
  for (const Case& made : cases) run(model, made, 2, threads);  // warm-up
  std::printf("%.9f\n", now());
  for (const Case& made : cases) {
    for (const auto& [prompt, seconds] : run(model, made, made.new_tokens, threads)) {
      std::printf("%d %.9f ", prompt, seconds);
    }
    std::printf("\n");
  }
  llama_free_model(model);
}
