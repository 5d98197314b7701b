//! Throughput beyond this machine's processors, by Gunther's Universal Scalability Law (USL).
//!
//! The law has three parameters: the throughput of one job `rate`, the *contention* (the share of
//! the work that only one job at a time can do), and the *coherence* (the cost of keeping each pair
//! of jobs consistent, for example of moving a cache line between two cores):
//!
//! ```text
//! X(n) = rate * n / (1 + contention * (n - 1) + coherence * n * (n - 1))
//! ```
//!
//! One and two jobs give two equations for three parameters. So there are two extreme fits, and the
//! truth lies between them: all of the loss is contention (this is Amdahl's law), or all of it is
//! coherence. With three or more measured numbers of jobs, least squares gives both.
//!
//! Source: N. J. Gunther, *Guerrilla Capacity Planning*, Springer 2007, chapters 4 to 6.

pub mod command;

/// Parameters of the law.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Usl {
    /// Operations per second of one job.
    pub rate: f64,
    /// Share of the work that one job at a time does.
    pub contention: f64,
    /// Cost of each pair of jobs, relative to the work of one job.
    pub coherence: f64,
}

impl Usl {
    /// Throughput of `jobs` jobs, each with a core of its own.
    pub fn throughput(&self, jobs: u32) -> f64 {
        let n = f64::from(jobs);
        self.rate * n / (1.0 + self.contention * (n - 1.0) + self.coherence * n * (n - 1.0))
    }

    /// The fits of measured pairs of jobs and throughput. Two numbers of jobs give the two extreme
    /// fits, contention first; more give one. A loss below zero (two jobs do more than twice as
    /// much) counts as zero. Empty without a value for one job, or with that alone.
    pub fn fit(measured: &[(u32, f64)]) -> Vec<Usl> {
        let Some(&(_, rate)) = measured.iter().find(|(jobs, _)| *jobs == 1) else {
            return Vec::new();
        };
        // The loss n * rate / X(n) - 1, divided by n - 1, is contention + coherence * n.
        let loss = |&(jobs, throughput): &(u32, f64)| {
            let n = f64::from(jobs);
            (n, (n * rate / throughput - 1.0) / (n - 1.0))
        };
        let losses: Vec<(f64, f64)> =
            measured.iter().filter(|(jobs, _)| *jobs > 1).map(loss).collect();
        let of = |contention: f64, coherence: f64| Usl {
            rate,
            contention: contention.max(0.0),
            coherence: coherence.max(0.0),
        };
        match losses[..] {
            [] => Vec::new(),
            [(n, loss)] => vec![of(loss, 0.0), of(0.0, loss / n)],
            _ => {
                let count = losses.len() as f64;
                let mean = |of: fn(&(f64, f64)) -> f64| losses.iter().map(of).sum::<f64>() / count;
                let (n, loss) = (mean(|it| it.0), mean(|it| it.1));
                let squares: f64 = losses.iter().map(|it| (it.0 - n).powi(2)).sum();
                let products: f64 = losses.iter().map(|it| (it.0 - n) * (it.1 - loss)).sum();
                let slope = products / squares;
                // Neither parameter is negative: the other one alone is fitted then.
                vec![match (slope < 0.0, loss < slope * n) {
                    (true, _) => of(loss, 0.0),
                    (_, true) => of(0.0, loss / n),
                    _ => of(loss - slope * n, slope),
                }]
            }
        }
    }

    /// The name of the fit: which of the two losses it has.
    pub fn name(&self) -> &'static str {
        match (self.contention > 0.0, self.coherence > 0.0) {
            (true, true) => "contention and coherence",
            (true, false) => "contention",
            (false, true) => "coherence",
            (false, false) => "linear",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAW: Usl = Usl { rate: 1e6, contention: 0.05, coherence: 0.002 };

    fn measured(jobs: &[u32]) -> Vec<(u32, f64)> {
        jobs.iter().map(|&jobs| (jobs, LAW.throughput(jobs))).collect()
    }

    #[test]
    fn least_squares_finds_the_parameters_of_an_exact_law() {
        let [found] = Usl::fit(&measured(&[1, 2, 4, 8, 16]))[..] else { panic!("one fit") };
        assert!((found.contention - LAW.contention).abs() < 1e-9, "{found:?}");
        assert!((found.coherence - LAW.coherence).abs() < 1e-9, "{found:?}");
        assert_eq!(found.name(), "contention and coherence");
    }

    #[test]
    fn two_points_give_two_fits_that_enclose_the_law() {
        let [contention, coherence] = Usl::fit(&measured(&[1, 2]))[..] else { panic!("two fits") };
        assert_eq!((contention.coherence, coherence.contention), (0.0, 0.0));
        for fit in [contention, coherence] {
            assert!((fit.throughput(2) / LAW.throughput(2) - 1.0).abs() < 1e-9, "{fit:?}");
        }
        for jobs in [4, 8, 48, 96] {
            let range = coherence.throughput(jobs)..contention.throughput(jobs);
            assert!(range.contains(&LAW.throughput(jobs)), "{jobs}: {range:?}");
        }
    }

    #[test]
    fn a_gain_above_linear_is_fitted_as_linear() {
        for fit in Usl::fit(&[(1, 100.0), (2, 220.0)]) {
            assert_eq!((fit.throughput(8), fit.name()), (800.0, "linear"));
        }
    }

    #[test]
    fn no_parameter_is_negative() {
        // The loss per further job falls with the number of jobs, or grows faster than the law.
        for points in [[(1, 100.0), (2, 120.0), (4, 360.0)], [(1, 100.0), (2, 200.0), (4, 90.0)]] {
            let [fit] = Usl::fit(&points)[..] else { panic!("one fit") };
            assert!(fit.contention >= 0.0 && fit.coherence >= 0.0, "{fit:?}");
            assert!(fit.throughput(64).is_finite());
        }
    }

    #[test]
    fn one_point_gives_no_fit() {
        assert_eq!(Usl::fit(&[(1, 100.0)]), []);
        assert_eq!(Usl::fit(&[(2, 100.0), (4, 150.0)]), []);
    }
}
