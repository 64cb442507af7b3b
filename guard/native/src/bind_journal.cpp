#include <nanobind/nanobind.h>

void bind_journal(nanobind::module_&) {}
