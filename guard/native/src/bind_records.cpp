#include <nanobind/nanobind.h>

void bind_records(nanobind::module_&) {}
