#include "findings.h"

namespace cuda_host {

namespace {

constexpr uint32_t kMost = 64;

bool same_place(const Finding& a, const Finding& b) {
  if (a.kind != b.kind || a.region != b.region || a.parties != b.parties) return false;
  for (uint32_t i = 0; i < a.parties; ++i) {
    if (a.party[i].action != b.party[i].action) return false;
    if (a.party[i].places[0] != b.party[i].places[0]) return false;
  }
  return true;
}

}  // namespace

void Findings::add(const Finding& finding) {
  for (Finding& known : list_) {
    if (same_place(known, finding)) {
      ++known.occurrences;
      return;
    }
  }
  if (list_.size() < kMost) list_.push_back(finding);
}

}  // namespace cuda_host
