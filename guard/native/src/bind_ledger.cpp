#include <nanobind/nanobind.h>

void bind_ledger(nanobind::module_&) {}
