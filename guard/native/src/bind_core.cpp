#include <nanobind/nanobind.h>

void bind_core(nanobind::module_&) {}
