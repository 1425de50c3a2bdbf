#include "core/registry.h"

#include <array>
#include <map>

#include "core/cpu.h"
#include "core/entry.h"

namespace tilerank {
namespace {

struct Entry {
  std::string name;
  std::array<Kernel, kIsas> versions{};
  Isa chosen = Isa::reference;
  std::string parameters{};
};

std::vector<Entry>& entries() {
  static auto* all = new std::vector<Entry>;  // on first use, because static initialisers of other files register
  return *all;
}

std::map<std::string, int>& ids() {
  static auto* all = new std::map<std::string, int>;
  return *all;
}

}  // namespace

void register_kernel(const char* name, Isa isa, Kernel kernel) {
  const auto [known, added] = ids().try_emplace(name, static_cast<int>(entries().size()));
  if (added) entries().push_back({name});
  entries()[known->second].versions[static_cast<int>(isa)] = kernel;
}

void note_parameters(const char* name, const char* parameters, std::span<const char* const> fields) {
  std::string text = parameters;
  for (const char* const names : fields) {
    if (names) text.append("; ").append(names);
  }
  std::string& known = entries()[ids().at(name)].parameters;
  if (known.empty()) known = text;
  if (known != text) known += " or " + text;  // fits no contract
}

int kernel_id(const std::string& name) {
  const auto known = ids().find(name);
  if (known == ids().end()) throw Error("kernel: expected the name of a registered kernel, found \"" + name + "\"");
  return known->second;
}

static Entry& entry_of(int id) {
  if (id < 0 || id >= static_cast<int>(entries().size())) {
    throw Error("launch: expected a kernel number from kernel(), found " + std::to_string(id));
  }
  return entries()[id];
}

const std::string& kernel_name(int id) { return entry_of(id).name; }
const std::string& kernel_parameters(int id) { return entry_of(id).parameters; }

Kernel find_kernel(int id, Isa isa) {
  const Entry& entry = entry_of(id);
  for (int i = static_cast<int>(isa); i > 0; --i) {
    if (entry.versions[i]) return entry.versions[i];
  }
  throw Error("launch: " + entry.name + " has no version for the rung " + isa_name(isa));
}

void choose_isa(int id, Isa isa) { entry_of(id).chosen = isa; }
Kernel chosen_kernel(int id) { return find_kernel(id, entry_of(id).chosen); }

std::vector<std::pair<std::string, std::vector<Isa>>> registered_kernels() {
  std::vector<std::pair<std::string, std::vector<Isa>>> all;
  for (const auto& [name, id] : ids()) {
    std::vector<Isa> rungs;
    for (int i = 1; i < kIsas; ++i) {
      if (entries()[id].versions[i]) rungs.push_back(static_cast<Isa>(i));
    }
    all.emplace_back(name, rungs);
  }
  return all;
}

}  // namespace tilerank
