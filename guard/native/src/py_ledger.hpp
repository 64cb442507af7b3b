// What the ledger concludes, for Python.
#pragma once

#include <nanobind/nanobind.h>

#include "ledger/ledger.hpp"

namespace kvguard {

// A finding's contents, in the order of guard.native.ledger's `_Contents`.
nanobind::object contents(const Finding& finding);

}  // namespace kvguard
