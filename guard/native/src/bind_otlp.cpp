#include <nanobind/nanobind.h>

void bind_otlp(nanobind::module_&) {}
