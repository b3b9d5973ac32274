//! Record classes: immutable values of the core with named attributes.
//!
//! Invariant: an attribute is computed at each access, so that making a record copies nothing. Cost:
//! that of the core's value.

/// Defines a class that wraps a value of the core: its attributes, its `repr`, further methods.
macro_rules! record {
    (
        $(#[$meta:meta])*
        $class:ident($inner:ty) |$value:ident, $py:ident| {
            $($(#[$doc:meta])* $field:ident: $type:ty = $of:expr;)*
        }
        repr $repr:expr;
        $($method:tt)*
    ) => {
        $(#[$meta])*
        #[pyo3::pyclass(frozen, module = "kvtrie")]
        pub(crate) struct $class(pub(crate) $inner);

        impl From<$inner> for $class {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }

        #[allow(
            clippy::elidable_lifetime_names, clippy::new_ret_no_self, clippy::wrong_self_convention,
            reason = "names and lifetimes are those of the attributes"
        )]
        #[pyo3::pymethods]
        impl $class {
            $(
                $(#[$doc])*
                #[getter]
                fn $field<'py>(&self, $py: pyo3::Python<'py>) -> $type {
                    let ($value, _) = (&self.0, $py);
                    $of
                }
            )*

            fn __repr__(&self, $py: pyo3::Python<'_>) -> String {
                let ($value, _) = (&self.0, $py);
                $repr
            }

            $($method)*
        }
    };
}

pub(crate) use record;
