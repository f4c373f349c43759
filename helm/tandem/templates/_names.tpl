{{/* Names and labels. */}}

{{- define "tandem.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Short: pods of a group add a role and two numbers, and a label has at most 63 characters. */}}
{{- define "tandem.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "tandem.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "tandem.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The same of the release whose routers the workers join, which is mostly this one. */}}
{{- define "tandem.routersFullname" -}}
{{- $join := .Values.join -}}
{{- if $join.release -}}
{{- $values := dict "nameOverride" "" "fullnameOverride" $join.fullname -}}
{{- include "tandem.fullname" (dict "Values" $values "Chart" .Chart "Release" (dict "Name" $join.release)) -}}
{{- else -}}
{{- include "tandem.fullname" . -}}
{{- end -}}
{{- end -}}

{{- define "tandem.selector" -}}
app.kubernetes.io/name: {{ include "tandem.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Labels of one part: (dict "root" $ "part" "router"). */}}
{{- define "tandem.partSelector" -}}
{{ include "tandem.selector" .root }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "tandem.partLabels" -}}
{{ include "tandem.labels" .root }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "tandem.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tandem.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "tandem.secretName" -}}
{{- default (printf "%s-secret" (include "tandem.routersFullname" .)) .Values.secret.existing -}}
{{- end -}}

{{/* Of the certificate of one role: (dict "root" $ "part" "router"). */}}
{{- define "tandem.tlsSecretName" -}}
{{- $own := printf "%s-{role}-tls" (include "tandem.fullname" .root) -}}
{{- default $own .root.Values.tls.existingSecret | replace "{role}" .part -}}
{{- end -}}

{{/* One that has the authority, of a role that this release has. */}}
{{- define "tandem.authoritySecretName" -}}
{{- include "tandem.tlsSecretName" (dict "root" . "part" (ternary "prefill" "router" (ne .Values.join.release ""))) -}}
{{- end -}}

{{- define "tandem.modelClaim" -}}
{{- if eq .Values.model.source "claim" -}}
{{- printf "%s-model" (include "tandem.fullname" .) -}}
{{- else -}}
{{- .Values.model.existingClaim -}}
{{- end -}}
{{- end -}}

{{/* A name of this release as other pods call it: (dict "root" $ "name" "x"). */}}
{{- define "tandem.dns" -}}
{{- printf "%s.%s.svc.%s" .name .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}

{{- define "tandem.endpoint" -}}
{{- $host := include "tandem.dns" (dict "root" . "name" (printf "%s-router" (include "tandem.routersFullname" .))) -}}
{{- printf "%s://%s:%v" (ternary "https" "http" .Values.tls.enabled) $host .Values.router.service.port -}}
{{- end -}}

{{/*
The image of one part: (dict "root" $ "values" the part's "device" "cpu"). A part's own tag or repository is not
hidden by the digest of all.
*/}}
{{- define "tandem.image" -}}
{{- $own := default dict .values.image -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) $own -}}
{{- if and (or $own.tag $own.repository) (not $own.digest) -}}
{{- $_ := set $image "digest" "" -}}
{{- end -}}
{{- $registry := default (default dict .root.Values.global).imageRegistry $image.registry -}}
{{- $name := ternary (printf "%s/%s" $registry $image.repository) $image.repository (not (empty $registry)) -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- $suffix := ternary "gpu" "cpu" (eq .device "cuda") -}}
{{- printf "%s:%s" $name (default (printf "%s-%s" .root.Chart.AppVersion $suffix) $image.tag) -}}
{{- end -}}
{{- end -}}

{{- define "tandem.pullPolicy" -}}
{{- default .root.Values.image.pullPolicy (default dict .values.image).pullPolicy -}}
{{- end -}}
